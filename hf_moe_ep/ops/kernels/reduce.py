"""Sums over pairs, each in a fixed order and in fp32: bandwidth is all they need.

    combine        out_RH[r]    = sum over k of (weights[r, k] *) rows_AH[slots[r, k]]
    weight_grads   out_RK[r, k] = sum over columns of partial[column, slots[r, k]]
    segment_sum    out_LN[l]    = scale * sum over the pairs of expert l of (weight *) rows[row]

Slots of pairs that are not here point past the last row: they are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import Routing

_SUM_ROWS, _SUM_COLUMNS, _FLAT = 32, 128, 256


@triton.jit
def combine_kernel(
    rows, slots, weights, out, num_pairs, hidden,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(slots + row * TOP_K + k)
        # Not `inside & (slot < num_pairs)`: the interpreter makes no mask of block & scalar.
        here = h < tl.where(slot < num_pairs, hidden, 0)
        y = tl.load(rows + slot.to(tl.int64) * hidden + h, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A weight that no pair here has may be anything, NaN included.
            s = tl.load(weights + row * TOP_K + k, mask=slot < num_pairs, other=0.0)
            y = y * s.to(tl.float32)
        total += y
    tl.store(out + row * hidden + h, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weight_grads_kernel(
    partial, slots, out, num_pairs, num_columns, num_slots, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_slots
    slot = tl.load(slots + index, mask=inside, other=num_pairs).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_columns):
        total += tl.load(partial + slot, mask=slot < num_pairs, other=0.0)
        partial += num_pairs
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def segment_sum_kernel(
    rows, pair_of_position, weights, offsets, out, top_k, width, row_stride, scale,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_M):
        position = first + tl.arange(0, BLOCK_M)
        inside = position < end
        row = position
        if GATHER or WEIGHTED:
            pair = tl.load(pair_of_position + position, mask=inside, other=0)
        if GATHER:
            row = pair // top_k
        row_ptrs = rows + row.to(tl.int64)[:, None] * row_stride + n[None, :]
        y = tl.load(row_ptrs, mask=inside[:, None] & (n < width)[None, :], other=0.0)
        y = y.to(tl.float32)
        if WEIGHTED:
            s = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
            y = y * s[:, None]
        total += tl.sum(y, axis=0)
    out_ptrs = out + expert.to(tl.int64) * width + n
    tl.store(out_ptrs, (total * scale).to(out.dtype.element_ty), mask=n < width)


def combine(rows_AH: Tensor, slots_RK: Tensor, weights_RK: Tensor | None) -> Tensor:
    """out_RH in the dtype of `rows_AH`; everything is contiguous, and there is a row to write."""
    num_pairs, hidden = rows_AH.shape
    num_rows, top_k = slots_RK.shape
    out_RH = rows_AH.new_empty(num_rows, hidden)
    block = min(triton.next_power_of_2(hidden), 2048)
    combine_kernel[(num_rows, triton.cdiv(hidden, block))](
        rows_AH, slots_RK, weights_RK, out_RH, num_pairs, hidden,
        TOP_K=top_k, WEIGHTED=weights_RK is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out_RH


def weight_grads(partial_CA: Tensor, routing: Routing, like_RK: Tensor) -> Tensor:
    """The gradient of the routing weights, zero for pairs that are not here."""
    columns, num_pairs = partial_CA.shape
    out_RK = torch.empty_like(like_RK, memory_format=torch.contiguous_format)
    num_slots = out_RK.numel()
    weight_grads_kernel[(triton.cdiv(num_slots, _FLAT),)](
        partial_CA, routing.slots_RK, out_RK, num_pairs, columns, num_slots, BLOCK=_FLAT
    )
    return out_RK


def segment_sum(
    rows: Tensor,
    like_LN: Tensor,
    routing: Routing,
    top_k: int,
    weights_RK: Tensor | None,
    *,
    scale: float,
    gather: bool,
) -> Tensor:
    """The gradient of a bias; rows are gathered, or lie in pair order."""
    num_experts, width = like_LN.shape
    out_LN = torch.empty_like(like_LN, memory_format=torch.contiguous_format)
    segment_sum_kernel[(num_experts, triton.cdiv(width, _SUM_COLUMNS))](
        rows, routing.pair_A, weights_RK, routing.offsets, out_LN, top_k, width, rows.stride(0),
        scale, GATHER=gather, WEIGHTED=weights_RK is not None,
        BLOCK_M=_SUM_ROWS, BLOCK_N=_SUM_COLUMNS,
    )  # fmt: skip
    return out_LN
