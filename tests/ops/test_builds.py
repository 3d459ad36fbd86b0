"""`launch` takes the build of a kernel that Triton would take."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_moe_ep.ops.kernels.launch import Constants, launch, launch_build


def _kernel(rows, size, stride, scale, bias, blocks, BLOCK, FLAG):  # the signature is all
    pass


class _Kernel(triton.JITFunction):
    """A kernel that runs nothing. A build is what Triton's own binder says of the arguments."""

    def __init__(self) -> None:
        _kernel.__annotations__ = dict.fromkeys(("BLOCK", "FLAG"), triton.language.constexpr)
        super().__init__(_kernel)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(self.signature, self.params, backend)
        self.chosen_by_triton: list[str] = []
        self.launched: list[tuple[str, tuple[Any, ...], Any]] = []

    def bind(self, *args: Any, **constants: Any) -> str:
        bound, specialization, options = self._bind(*args, **constants)
        fixed = {name: bound[name] for name in ("BLOCK", "FLAG")}
        return f"{specialization} {options} {fixed}"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            build = self.bind(*args, **constants)
            self.chosen_by_triton.append(build)
            self.launched.append((build, (*args, constants["BLOCK"], constants["FLAG"]), grid))
            return _Build(build, self.launched)

        return run


class _Build:
    """A build with the attributes of Triton's CompiledKernel that a launch reads."""

    function, packed_metadata = "the function", "its metadata"

    def __init__(self, name: str, launched: list[tuple[str, tuple[Any, ...], Any]]) -> None:
        self._name, self._launched = name, launched

    def run(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        function, metadata, *hooks = arguments[:5]
        assert (stream, function, metadata) == (7, self.function, self.packed_metadata)
        assert hooks == [None] * 3
        self._launched.append((self._name, arguments[5:], (x, y, z)))


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    return _Kernel()


def _list_calls() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    rows = (memory, memory[1:], memory[8:], memory.float(), memory.float()[1:])
    numbers = (0, 1, 2, 8, 16, 2048, 2050, 2**31, 2**31 + 1)
    matrix = torch.zeros(32, 32, dtype=torch.bfloat16)
    blocks = (
        None,
        matrix,
        TensorDescriptor.from_tensor(matrix, [16, 16]),
        TensorDescriptor.from_tensor(matrix, [16, 32]),
        TensorDescriptor.from_tensor(matrix.float(), [16, 16]),
    )
    constants = (
        {"BLOCK": 64, "FLAG": True},
        {"BLOCK": 128, "FLAG": True},
        {"BLOCK": 128, "FLAG": False},
        {"BLOCK": 128, "FLAG": True, "num_warps": 4},
        {"BLOCK": 128, "FLAG": True, "num_warps": 8},
        {"BLOCK": 128, "FLAG": True, "num_stages": 8},
    )
    for first, size in itertools.product(rows, numbers):
        yield (first, size, 48, 1.0, None, None), constants[0]
    for stride, scale, bias in itertools.product((1, 16, 17), (0.5, 1.0), (None, *rows[:2])):
        yield (memory, 32, stride, scale, bias, None), constants[0]
    for described, fixed in itertools.product(blocks, constants):
        yield (memory, 32, 32, 0.5, None, described), fixed


def test_each_launch_takes_the_build_that_triton_would_take(kernel: _Kernel) -> None:
    calls = list(_list_calls()) * 2
    kept: dict[str, Constants] = {}
    for args, constants in calls:
        launch(kernel, (3,), kept.setdefault(str(constants), Constants(**constants)), *args)
    builds = [kernel.bind(*args, **constants) for args, constants in calls]
    assert [build for build, _, _ in kernel.launched] == builds
    for (args, constants), (_, launched, grid) in zip(calls, kernel.launched, strict=True):
        assert grid[0] == 3
        assert all(x is y for x, y in zip(launched, (*args, *constants.values()), strict=False))
    # Triton chooses again for some numbers that do not matter to it, but for no call twice.
    assert len(set(builds)) <= len(kernel.chosen_by_triton) < len(calls) / 3


def test_the_same_arguments_on_another_device_are_another_build(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = (torch.zeros(16), 16, 16, 1.0, None, None)
    constants = Constants(BLOCK=64, FLAG=False)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(_Driver, "get_current_device", lambda _, device=device: device)
        launch(kernel, (1, 2), constants, *call)
    assert len(kernel.chosen_by_triton) == 2


def test_another_kernel_does_not_take_the_builds_of_the_first(kernel: _Kernel) -> None:
    """A test or a benchmark may replace a kernel, for example by one that records."""
    other, constants = _Kernel(), Constants(BLOCK=64, FLAG=False)
    for launched in (kernel, other, kernel):
        launch(launched, (1,), constants, torch.zeros(16), 16, 16, 1.0, None, None)
    assert (len(kernel.launched), len(other.launched)) == (2, 1)


class _ChainedBuild:
    """A build that records whether Triton's own launch is used, which calls the hooks."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.ways: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.ways.append("triton")

    def run(self, *args: Any) -> None:
        self.ways.append("direct")


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_profilers_see_each_launch(name: str) -> None:
    """Proton adds such hooks. It needs the metadata that only Triton's own launch makes."""
    build, chain = _ChainedBuild(), getattr(triton.knobs.runtime, name)
    launch_build(build, (1, 1, 1), 7, ())
    hook = print
    chain.add(hook)
    try:
        launch_build(build, (1, 1, 1), 7, ())
    finally:
        chain.remove(hook)
    launch_build(build, (1, 1, 1), 7, ())
    assert build.ways == ["direct", "triton", "direct"]
