"""Make transformers compute in fp64 where an fp64 model would compute in fp32 (`FP64`).

Stock computes routers, rotary embeddings, norms and losses in fp32, whatever the dtype of weights.
A matrix product rounds differently for another number of rows. A stock model and a model that
computes slices of the batch would therefore differ by 1e-7, which would hide small mistakes.
"""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

# The function with which backward starts autograd's engine. The engine's own operators call no
# mode, but recomputes and autograd functions in Python do.
_ENGINE = "_engine_run_backward"
_run_engine = getattr(torch.autograd, _ENGINE)


class FP64(TorchFunctionMode):
    """Context manager that replaces fp32 by fp64, also in backward and in recomputes.

    torch switches a mode off while it calls the mode, and backward uses the modes that are on when
    autograd's engine starts. So the mode is switched on again before the engine starts.
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
        named = {name: _widen(x) for name, x in (kwargs or {}).items()}
        if func is torch.autograd.backward:
            with patch.object(torch.autograd, _ENGINE, self._run_with_mode):
                return func(*args, **named)
        if func is torch.Tensor.backward:
            with self:
                options = {n: x for n, x in named.items() if n != "gradient"}
                return torch.autograd.backward(args[0], named.get("gradient"), **options)
        return func(*map(_widen, args), **named)

    def _run_with_mode(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return _run_engine(*args, **kwargs)


def _widen(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
