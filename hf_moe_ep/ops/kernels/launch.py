"""Launch a kernel without asking Triton again which build of it these arguments need.

Triton builds a kernel for each combination of dtypes, constants, addresses that 16 divides and
integers that 16 divides or that are 1. To find the build of a launch, it makes a text of all of
them, which takes the host longer than the launch itself. `launch` finds the build by a tuple, which
does not contain the constants: `Constants` holds them, and the builds that were made with them.

    constants = Constants(BLOCK=128, num_warps=4)                   once
    launch(kernel, grid, constants, rows, 2048)                     does what
    kernel[grid](rows, 2048, BLOCK=128, num_warps=4)                does, in 40 % of the time

The first launch of each combination is Triton's. `benchmarks/launch_steps.py` measures the host's
time without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


class Constants:
    """The constants of a kernel's launches, compiler options such as `num_warps`, and the builds.

    The launchers of a kernel keep one object per combination (`functools.cache`).
    """

    def __init__(self, **values: Any) -> None:
        self.values = values
        # By what a build depends on besides the constants: the kernel, the build, and the kernel's
        # constants in the order of its signature.
        self.builds: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants, *args: Any) -> None:
    """Launch `kernel` on the current device and stream.

    `grid` has one or two dimensions. `args` are all arguments that are not constants, in the order
    of the kernel's signature.
    """
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*args, **constants.values)  # interpreted
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = (device, *_describe(args))
    known = constants.builds.get(key)
    if known is None or known[0] is not kernel:
        build = kernel[grid](*args, **constants.values)
        names = kernel.arg_names[len(args) :]
        values = tuple(constants.values[name] for name in names)
        constants.builds[key] = kernel, build, values
        return
    _, build, values = known
    x, y = grid if len(grid) == 2 else (*grid, 1)
    launch_build(build, (x, y, 1), driver.get_current_stream(device), args + values)


def launch_build(
    build: Any, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]
) -> None:
    """Launch `build` with all arguments of its signature, constants included.

    Hooks of profilers such as Proton get what Triton passes to them. Without hooks their arguments
    are not made, which saves 40 % of the host's time in Triton's `CompiledKernel.__getitem__`. The
    attributes below are the same in Triton 3.6 and 3.9.
    """
    runtime = triton.knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        build[grid](*args, stream=stream)
        return
    build.run(*grid, stream, build.function, build.packed_metadata, None, None, None, *args)


def _describe(args: tuple[Any, ...]) -> list[Any]:
    """Return what Triton's choice of a build depends on. The values of floats do not decide.

    Each argument becomes one item. If 16 does not divide all addresses, one more item lists the
    tensors whose addresses it divides.
    """
    items: list[Any] = []
    addresses = 0
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
            addresses |= argument.data_ptr()
        elif isinstance(argument, TensorDescriptor):
            items.append((argument.base.dtype, *argument.block_shape))
        else:
            items.append(type(argument))
    if addresses % 16:
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        items.append(tuple(x.data_ptr() % 16 == 0 for x in tensors))
    return items


def cdiv(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up. `triton.cdiv` takes 20 times as long on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
