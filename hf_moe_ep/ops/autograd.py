"""Helpers for autograd functions that pass gradients to each other outside of the graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hf_moe_ep.upstream.autograd_modes import forward_gradients_are_computed, hidden_from_modes


def mark_without_grad(ctx: Any, outputs: tuple[Tensor, ...], needs: tuple[bool, ...]) -> None:
    """Mark the outputs whose inputs need no gradient as not differentiable."""
    pairs = zip(outputs, needs, strict=True)
    ctx.mark_non_differentiable(*(output for output, needed in pairs if not needed))


def refuse_tangents(tensors: Iterable[Tensor | None], instead: str) -> None:
    """Raise ValueError if forward-mode differentiation (`torch.autograd.forward_ad`) runs.

    Operators without a formula for this mode return results without a tangent, so torch would treat
    the results as constants.

    Args:
        tensors: the inputs of a computation without such a formula.
        instead: names the computation, and says how stock code computes it.
    """
    if torch.compiler.is_compiling() or not forward_gradients_are_computed():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise ValueError(
            f"torch.autograd.forward_ad and torch.func.jvp cannot differentiate {instead}, or "
            f"compute gradients with backward()"
        )


def make_tensor_without_values(like: Tensor) -> Tensor:
    """Return a tensor with the shape, dtype and device of `like`, in the memory of one element.

    The element is NaN, so that code which reads the tensor by mistake is noticed.
    """
    return like.new_full((), math.nan).expand(like.shape)


def replace_values(x: Tensor, values: Tensor) -> Tensor:
    """Return `values` as a tensor with the gradient function of `x`. Both have the same shape."""
    return _ReplaceValues.apply(x, values)


class _ReplaceValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def make_placeholder_grad(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a placeholder gradient of the given shape, in the memory of one element.

    A node returns the placeholder to autograd if the node passes the real gradient to the next node
    outside of the autograd graph. All placeholders share one cached element, so they need no kernel
    launch. This is safe, because autograd never writes to a tensor whose elements overlap.
    """
    if shape.numel() > 1 and type(like) is Tensor:
        return _zero(like.dtype, like.device).expand(shape)
    return like.new_zeros(()).expand(shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    with hidden_from_modes():
        return torch.zeros((), dtype=dtype, device=device)
