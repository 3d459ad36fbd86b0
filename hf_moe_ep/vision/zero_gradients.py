"""`ZeroGradients`: make backward run through modules that do not affect the loss of this rank.

The loss of another rank depends on these modules. In the backward of the modules, the other rank
waits for this rank in an all-gather or a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import make_placeholder_grad


class ZeroGradients(torch.autograd.Function):
    """Return the first `count` tensors; backward sends exact zeros to all other tensors.

    Backward first calls `before_backward`. Then it passes on the gradients of the first `count`
    tensors. With `fill`, zeros replace a missing gradient of these tensors.

    Forward saves a tensor, and backward reads it. Under activation checkpointing, the first read of
    a saved tensor starts the recompute. This rank therefore recomputes at the same point as the
    ranks that use the other tensors, and all ranks run their collectives in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        fill: bool,
        before_backward: Callable[[], Any] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.fill, ctx.before_backward = fill, before_backward
        ctx.like = [(tensor.new_empty(0), tensor.shape) for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensors[0].new_empty(0))
        # An in-place operator on a view would lose the hook that FSDP2 registers on the output.
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        if ctx.before_backward is not None:
            ctx.before_backward()
        count = len(grads)
        returned = [
            make_placeholder_grad(*like) if grad is None and ctx.fill else grad
            for grad, like in zip(grads, ctx.like[:count], strict=True)
        ]
        unused_inputs = zip(ctx.like[count:], ctx.needs_input_grad[3 + count :], strict=True)
        zeros = [make_placeholder_grad(*like) if needed else None for like, needed in unused_inputs]
        return None, None, None, *returned, *zeros
