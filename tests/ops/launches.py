"""Record the launches of Triton kernels instead of running them.

    with Launches() as launches:
        triton_mlp.forward(...)         tensors may be on "meta" or fake: nothing is computed
    launches.variants["up_kernel"]      one line for each kernel that Triton would compile

A variant is the output of Triton's own binder for an H100: types, constants, and whether pointers
and integers are divisible by 16 (or equal to 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from hf_moe_ep.ops.kernels import dgated, gate_up, grouped_mm, outer, reduce, sort_pairs

KERNEL_MODULES = (dgated, gate_up, grouped_mm, outer, reduce, sort_pairs)


class Launches:
    """Record launches inside a `with` block, in which no kernel runs.

    If `on_launch` is given, each launch calls `on_launch(name)` instead of Triton's binder.
    """

    def __init__(self, on_launch: Callable[[str], None] | None = None) -> None:
        self.variants: dict[str, set[str]] = defaultdict(set)
        self._on_launch = on_launch
        self._kernels: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Launches:
        for module in KERNEL_MODULES:
            for name, kernel in list(vars(module).items()):
                is_kernel = isinstance(kernel, (JITFunction, InterpretedFunction))
                if is_kernel and name.endswith("_kernel"):
                    self._kernels.append((module, name, kernel))
                    record = self._on_launch or self.variants[name].add
                    recorder = _Recorder(name, kernel, record, bind=self._on_launch is None)
                    setattr(module, name, recorder)
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, kernel in self._kernels:
            setattr(module, name, kernel)


class _Recorder:
    """Replaces a kernel, and records the launches of this kernel."""

    def __init__(
        self, name: str, kernel: Any, record: Callable[[str], None], *, bind: bool
    ) -> None:
        self._name, self._record, self._bind = name, record, None
        if isinstance(kernel, InterpretedFunction):
            kernel = JITFunction(kernel.fn, **kernel.kwargs)
        if bind:
            backend = make_backend(GPUTarget("cuda", 90, 32))
            self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)

        def launch(*args: Any, **kwargs: Any) -> None:
            if self._bind is None:
                self._record(self._name)
                return
            arguments, specialization, options = self._bind(*args, **kwargs)
            kinds = dict(zip(arguments, specialization, strict=True))
            self._record(f"{kinds} {options}")

        return launch
