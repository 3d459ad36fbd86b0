"""Compute the norms of many tensors in one operator call.

torch.nn.utils.get_total_norm makes the same call, but cannot set the dtype of the result, so it
would round the norm of bf16 gradients to bf16 (torch/nn/utils/clip_grad.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def choose_norm_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the widest dtype of `tensors`, at least fp32."""
    return functools.reduce(torch.promote_types, {x.dtype for x in tensors}, torch.float32)


def compute_vector_norms(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the p-norm of each tensor as a scalar in `choose_norm_dtype(tensors)`."""
    if not tensors:
        return []
    return list(torch._foreach_norm([*tensors], norm_type, dtype=choose_norm_dtype(tensors)))
