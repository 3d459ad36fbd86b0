"""Helpers of autograd functions that pass gradients to each other outside of the autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mark_without_grad(ctx: Any, outputs: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
    """Mark the outputs whose inputs need no gradient as not differentiable."""
    pairs = zip(outputs, needs, strict=True)
    ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))


def placeholder_grad(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a placeholder gradient of the given shape, in the memory of one element.

    A node returns the placeholder to autograd if it passes the real gradient to the next node
    outside of the autograd graph.
    """
    return like.new_zeros(()).expand(shape)
