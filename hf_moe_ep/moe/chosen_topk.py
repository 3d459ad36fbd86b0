"""Replace a router's choice: `torch.topk` over the experts returns given indices.

    with ChosenTopK(num_experts, next_ids):     # next_ids() -> expert_ids_TK, or None
        model(...)

A stock router computes scores, takes the top k scores, and turns them into routing weights. Inside
the block topk returns the indices of `next_ids` and the current scores at these indices. Every kind
of router therefore computes the weights (and gradients) of the given experts.

A call of topk is replaced only if it may be a router's call: it must have one score per expert, and
choose as many experts as `next_ids` returns. All other calls, and all calls while `next_ids`
returns None, run torch's own topk. The caller's `next_ids` must return the ids of the layer that
runs. The caller may also pass a function `decide`. This function receives the ids of `next_ids` and
a function that computes torch's own choice, and returns the ids to use.
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

# (expert_ids_TK of `next_ids`, a function that computes torch's own choice) -> expert_ids_TK
Decide = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class ChosenTopK(TorchFunctionMode):
    """While it is active, `topk` over `num_experts` scores returns the indices of `next_ids`."""

    def __init__(
        self,
        num_experts: int,
        next_ids: Callable[[], Tensor | None],
        decide: Decide | None = None,
    ) -> None:
        super().__init__()
        self._num_experts, self._next_ids, self._decide = num_experts, next_ids, decide

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
        ids_TK = self._next_ids()
        if ids_TK is None:
            return func(*args, **kwargs)
        scores, k = (*args, *(kwargs[name] for name in ("input", "k") if name in kwargs))[:2]
        shape = (*scores.shape[:-1], k)
        if scores.shape[-1] != self._num_experts or math.prod(shape) != ids_TK.numel():
            return func(*args, **kwargs)
        flat_shape = ids_TK.shape

        def compute_own_choice() -> Tensor:
            with torch.no_grad():
                chosen: Tensor = func(*args, **kwargs).indices
            return chosen.view(flat_shape)

        with hidden_from_modes():
            if self._decide is not None:
                ids_TK = self._decide(ids_TK, compute_own_choice)
            ids = ids_TK if ids_TK.shape == shape else ids_TK.view(shape)
            return torch.return_types.topk((_GatherScores.apply(scores, ids), ids))


class _GatherScores(torch.autograd.Function):
    """Compute `scores.gather(-1, ids)`, but save only the indices for backward, as topk does.

    Checkpointing requires that a layer's first run and its recompute save equally many tensors.
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
