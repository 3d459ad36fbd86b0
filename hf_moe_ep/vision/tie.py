"""`Tie`: has a backward pass through what this rank has no use for, and others wait in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import nothing


class Tie(torch.autograd.Function):
    """Returns its first argument as it is; backward gives every `unseen` tensor zeros.

    It keeps a tensor, and asks for it: in backward a checkpoint computes again when the first one
    is asked for, and up to the last. So a rank does both where those with a use for `unseen` do,
    and not behind or before exchanges in which these wait.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *unseen: Tensor) -> Tensor:
        ctx.like = [(feature.new_empty(0), feature.shape) for feature in unseen]
        ctx.save_for_backward(hidden.new_empty(0))
        return hidden.clone()  # FSDP2's hook on a view would be lost to an in-place op

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        pairs = zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        return grad, *(nothing(*like) if needed else None for like, needed in pairs)
