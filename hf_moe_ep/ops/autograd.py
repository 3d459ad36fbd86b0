"""Small parts of autograd functions whose gradients pass beside autograd's own edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mark_without_grad(ctx: Any, outputs: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
    """Tell autograd which outputs need no gradient: those whose inputs need none."""
    pairs = zip(outputs, needs, strict=True)
    ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))


def nothing(like: Tensor, shape: torch.Size) -> Tensor:
    """A gradient of that shape which nobody reads, one element in memory.

    Two nodes hand it to each other where the gradient itself takes another way.
    """
    return like.new_zeros(()).expand(shape)
