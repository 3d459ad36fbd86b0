"""No fp32 within a model of fp64: what transformers computes in fp32 is computed in fp64.

Routers, rotary embeddings, norms and losses are fp32 whatever the weights are. A matrix product
rounds differently at another number of rows, so that stock and slices of it differ by 1e-7, which
would hide small mistakes.
"""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

# What backward hands to autograd's engine, past which no mode is asked.
_RUN = "_engine_run_backward"
_run = getattr(torch.autograd, _RUN)


class FP64(TorchFunctionMode):
    """Within this context whoever asks for fp32 gets fp64, in backward and what it computes again.

    A mode is off while it is asked, and autograd computes in the modes that its engine began in.
    """

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
