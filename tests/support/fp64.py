"""Make transformers compute in fp64 where an fp64 model would compute in fp32 (`FP64`).

Stock computes routers, rotary embeddings, norms and losses in fp32, whatever the dtype of weights.
A matrix product rounds differently for another number of rows. A stock model and one that has
slices of the batch would therefore differ by 1e-7, which would hide small mistakes.
"""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

# The function with which backward starts autograd's engine. The engine's operators call no mode.
_RUN = "_engine_run_backward"
_run = getattr(torch.autograd, _RUN)


class FP64(TorchFunctionMode):
    """Context manager that replaces fp32 by fp64, also in backward and in recomputes.

    torch switches a mode off while it calls the mode, and autograd keeps the modes that are on when
    its engine starts. So backward is called with the mode switched on again.
    """

    _depth = 0

    def __enter__(self) -> Any:
        FP64._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        FP64._depth -= 1
        return super().__exit__(*error)

    @classmethod
    def is_on(cls) -> bool:
        return cls._depth > 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wider(x) for name, x in (kwargs or {}).items()}
        if func is torch.autograd.backward:
            with patch.object(torch.autograd, _RUN, self._run):
                return func(*args, **named)
        if func is torch.Tensor.backward:
            with self:
                options = {n: x for n, x in named.items() if n != "gradient"}
                return torch.autograd.backward(args[0], named.get("gradient"), **options)
        return func(*map(_wider, args), **named)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return _run(*args, **kwargs)


def _wider(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
