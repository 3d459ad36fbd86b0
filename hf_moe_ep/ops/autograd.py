"""Helpers of autograd functions that pass gradients to each other outside of the autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mark_without_grad(ctx: Any, outputs: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
    """Mark the outputs whose inputs need no gradient as not differentiable."""
    pairs = zip(outputs, needs, strict=True)
    ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))


def nothing(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a placeholder gradient of that shape, which takes the memory of one element.

    A node passes it along an edge of the autograd graph if the gradient itself is passed outside.
    """
    return like.new_zeros(()).expand(shape)
