"""Launch a kernel without asking Triton again which build of it these arguments need.

Triton builds a kernel for each combination of dtypes, constants, addresses that 16 divides and
integers that 16 divides or that are 1. To find the build of a launch, it makes a text of all of
them, which takes the host longer than the launch itself. `launch` finds it by a tuple:

    launch(kernel, grid, rows, 2048, BLOCK=128, num_warps=4)        does what
    kernel[grid](rows, 2048, BLOCK=128, num_warps=4)                does, in half of the host's time

The first launch of each combination is Triton's. `benchmarks/launch_steps.py` measures the host's
time without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# By the key of a launch: the build, the kernel's constants in the order of its signature, and the
# kernel. The last keeps the id in the key from becoming another kernel's.
_builds: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on the current device and stream.

    `args` are all arguments that are not constants, in the order of the kernel's signature.
    `constants` are its constants, and compiler options as `num_warps`.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*args, **constants)  # interpreted
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = (id(kernel), device, *_describe(args), *constants, *constants.values())
    known = _builds.get(key)
    if known is None:
        build = kernel[grid](*args, **constants)
        names = kernel.arg_names[len(args) :]
        _builds[key] = build, tuple(constants[name] for name in names), kernel
        return
    build, values, _ = known
    while len(grid) < 3:
        grid = (*grid, 1)
    build[grid](*args, *values, stream=driver.get_current_stream(device))


def _describe(args: tuple[Any, ...]) -> list[Any]:
    """Return what Triton's choice of a build depends on. The values of floats do not decide.

    A tensor becomes two items and every other argument one, but the items still decide which
    argument is which: a dtype stands for a tensor, and nothing else does.
    """
    items: list[Any] = []
    for argument in args:
        if type(argument) is int:
            if argument == 1:
                items.append("1")
            else:
                items.append((argument % 16 == 0) + 2 * (argument >= 2**31))
        elif argument is None:
            items.append(None)
        elif isinstance(argument, torch.Tensor):
            items.append(argument.dtype)
            items.append(argument.data_ptr() % 16 == 0)
        elif isinstance(argument, TensorDescriptor):
            items.append((argument.base.dtype, *argument.block_shape))
        else:
            items.append(type(argument))
    return items


def cdiv(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up. `triton.cdiv` takes 20 times as long on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
