"""Add adapters to slices of a weight: W + scale * B A, for some experts, rows and columns.

For example, the rows 0 and 1 of experts 2 and 3 of gate_up_proj [8, 48, 32] need one product of
these slices of the factors:

    b_EOP [8, 48, r]   b[2:4, 0:2]        a_EPI [8, r, 32]   a[2:4]

The sums are rounded as in PEFT's `merge`: one adapter after the other is added to the weight, in
the promoted dtype of weight and product, and each sum is cast to the weight's dtype. On a CPU the
result is bit-equal to PEFT's for a whole parameter, and for single experts whose matrices are not
tiny.

`add_updates` changes copies of slices, which callers send or write to files. The model's own
weights are not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from hf_moe_ep.lora.factors import is_stacked, join_gate_and_up, stack_a, stack_b
from hf_moe_ep.upstream.adapters import LowRank

_HALF = (torch.bfloat16, torch.float16)


def gather_whole_factors(update: LowRank, a: Tensor, b: Tensor) -> LowRank:
    """Return `update` with the unsharded factors `a` and `b`.

    Factors of a stacked parameter are converted to [E, r, in] and [E, out, r].
    """
    if update.num_experts and is_stacked(a):
        a, b = join_gate_and_up(a, b)
    elif update.num_experts:
        a, b = stack_a(a, update.num_experts), stack_b(b, update.num_experts)
    return replace(update, a=a, b=b)


def compute_delta(update: LowRank, part: tuple[slice, ...]) -> Tensor:
    """Compute the update of a slice of the parameter from unsharded factors."""
    a, b = update.a, update.b
    *experts, rows, columns = part
    if update.transposed:
        rows, columns = columns, rows
    if experts:
        a, b = a[experts[0]], b[experts[0]]
    a, b = a[..., columns], b[..., rows, :]
    dtype = b.dtype
    if b.device.type == "cpu" and dtype in _HALF:  # as in PEFT
        a, b = a.float(), b.float()
    # For a transposed stack PEFT's einsum exchanges the operands, which changes the rounding if a
    # dim is small, so the operands are exchanged here too.
    if experts and update.transposed:
        return (a.mT @ b.mT).mul_(update.scale).to(dtype)
    product = (b @ a).mul_(update.scale).to(dtype)
    return product.mT if update.transposed else product


def add_updates(values: Tensor, part: tuple[slice, ...], updates: Iterable[LowRank]) -> Tensor:
    """Add `updates` to the values of a slice of a parameter, in place, and return the values."""
    for update in updates:
        delta = compute_delta(update, part)
        values += delta.to(values.dtype) if update.casts_product else delta
    return values
