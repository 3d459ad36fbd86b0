"""A router that is told what to choose: `torch.topk` over the experts gives indices from elsewhere.

    with ChosenTopK(num_experts, upcoming):     # upcoming() -> expert_ids_TK, or None
        model(...)

A stock router computes scores, takes the top k of them and makes weights of what it took. Inside
the block the indices are those of `upcoming` and the values are the scores that stand there now:
weights, and their gradients, are those of the chosen experts, whatever the router is.

Only a `topk` that could be the router's is answered: over as many scores as there are experts, and
for as many choices as `upcoming` has. Any other one, and every one where `upcoming` has nothing,
is torch's own. Which layer comes next is the business of the caller, who may also `decide` in the
end: it is called with the ids and with a function that says what torch's own topk would choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hf_moe_ep.upstream.autograd_modes import hidden_from_modes

# (expert_ids_TK of `upcoming`, what topk itself would choose) -> expert_ids_TK
Decide = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class ChosenTopK(TorchFunctionMode):
    """Within it, `topk` over `num_experts` scores gives the indices that `upcoming` has."""

    def __init__(
        self,
        num_experts: int,
        upcoming: Callable[[], Tensor | None],
        decide: Decide | None = None,
    ) -> None:
        super().__init__()
        self._num_experts, self._upcoming, self._decide = num_experts, upcoming, decide

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        ids_TK = self._upcoming()
        if ids_TK is None:
            return func(*args, **kwargs)
        scores, k = (*args, *(kwargs[name] for name in ("input", "k") if name in kwargs))[:2]
        shape = (*scores.shape[:-1], k)
        if scores.shape[-1] != self._num_experts or math.prod(shape) != ids_TK.numel():
            return func(*args, **kwargs)
        flat = ids_TK.shape

        def live() -> Tensor:
            with torch.no_grad():
                chosen: Tensor = func(*args, **kwargs).indices
            return chosen.view(flat)

        with hidden_from_modes():
            if self._decide is not None:
                ids_TK = self._decide(ids_TK, live)
            ids = ids_TK if ids_TK.shape == shape else ids_TK.view(shape)
            return torch.return_types.topk((_Take.apply(scores, ids), ids))


class _Take(torch.autograd.Function):
    """`scores.gather(-1, ids)` that keeps for backward what topk keeps, the indices alone:
    checkpointing counts the tensors that both runs keep.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = scores.shape
        return scores.gather(-1, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(-1, ids, grad), None
