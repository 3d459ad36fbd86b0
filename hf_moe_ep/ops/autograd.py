"""Helpers for autograd functions that pass gradients to each other outside of the graph."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.upstream.autograd_modes import hidden_from_modes


def mark_without_grad(ctx: Any, outputs: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
    """Mark the outputs whose inputs need no gradient as not differentiable."""
    pairs = zip(outputs, needs, strict=True)
    ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))


def placeholder_grad(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a placeholder gradient of the given shape, in the memory of one element.

    A node returns the placeholder to autograd if it passes the real gradient to the next node
    outside of the autograd graph. All placeholders share one cached element, so they need no kernel
    launch. This is safe: autograd writes to no tensor whose elements overlap.
    """
    if shape.numel() > 1 and type(like) is Tensor:
        return _zero(like.dtype, like.device).expand(shape)
    return like.new_zeros(()).expand(shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with hidden_from_modes():
        return torch.zeros((), dtype=dtype, device=device)
