"""Sum over pairs in a fixed order and in fp32. Memory bandwidth limits these kernels.

    combine        out_RH[r]    = sum over k of (weights[r, k] *) rows_AH[positions[r, k]]
    weight_grads   out_RK[r, k] = sum over c of partial_CA[c, positions[r, k]]
    segment_sum    out_LO[l]    = scale * sum over the pairs of expert l of (weight *) rows[row]

`positions` has the position of each pair among the A sorted pairs. A pair without an expert here
has the position A, one past the last row, and no kernel reads a row there. The partial sums come
from `dgated.py`, one per block of columns.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import Routing
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch, next_power_of_2

# Rows and columns in a block of `segment_sum`, and routing weights in a block of `weight_grads`.
_SUM_ROWS = 32
_SUM_COLUMNS = 128
_WEIGHTS = 256
_WEIGHTS_CONSTANTS = Constants(BLOCK=_WEIGHTS)


@triton.jit(do_not_specialize=["num_pairs"])
def combine_kernel(
    rows, positions, weights, out, num_pairs, hidden, row_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        position = tl.load(positions + row * TOP_K + k)  # []
        # The interpreter cannot combine a block and a scalar, as in `& (position < num_pairs)`.
        m_here = o_h < tl.where(position < num_pairs, hidden, 0)
        p_y = rows + position.to(tl.int64) * row_stride + o_h  # [BLOCK]
        b_y = tl.load(p_y, mask=m_here, other=0.0)  # [BLOCK]
        b_y = b_y.to(tl.float32)
        if WEIGHTED:
            # The weight of a pair without an expert here may have any value, even NaN.
            s = tl.load(weights + row * TOP_K + k, mask=position < num_pairs, other=0.0)  # []
            b_y = b_y * s.to(tl.float32)
        total += b_y
    tl.store(out + row * hidden + o_h, total.to(out.dtype.element_ty), mask=o_h < hidden)


@triton.jit(do_not_specialize=["num_pairs", "num_column_blocks", "num_weights"])
def weight_grads_kernel(
    partial, positions, out, num_pairs, num_column_blocks, num_weights, BLOCK: tl.constexpr
):
    o_weight = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_weight = o_weight < num_weights
    position = tl.load(positions + o_weight, mask=m_weight, other=num_pairs).to(tl.int64)  # [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_column_blocks):
        total += tl.load(partial + position, mask=position < num_pairs, other=0.0)  # [BLOCK]
        partial += num_pairs
    tl.store(out + o_weight, total.to(out.dtype.element_ty), mask=m_weight)


@triton.jit
def segment_sum_kernel(
    rows, pair_of_position, row_of_position, weights, offsets, out, width, row_stride, scale,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_M):
        position = first + tl.arange(0, BLOCK_M)
        m_m = position < end
        row = position
        if GATHER:
            row = tl.load(row_of_position + position, mask=m_m, other=0)  # [M]
        p_y = rows + row.to(tl.int64)[:, None] * row_stride + o_n[None, :]  # [M, N]
        b_y = tl.load(p_y, mask=m_m[:, None] & (o_n < width)[None, :], other=0.0)  # [M, N]
        b_y = b_y.to(tl.float32)
        if WEIGHTED:
            pair = tl.load(pair_of_position + position, mask=m_m, other=0)  # [M]
            s = tl.load(weights + pair, mask=m_m, other=0.0).to(tl.float32)  # [M]
            b_y = b_y * s[:, None]
        total += tl.sum(b_y, axis=0)
    p_out = out + expert.to(tl.int64) * width + o_n
    tl.store(p_out, (total * scale).to(out.dtype.element_ty), mask=o_n < width)


def combine(
    rows_AH: Tensor,
    position_RK: Tensor,
    weights_RK: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return out_RH in `dtype`, or in the dtype of `rows_AH`. R is at least 1.

    Each row of `rows_AH` is contiguous, and the stride between rows may have any value. All other
    inputs are contiguous.
    """
    num_pairs, hidden = rows_AH.shape
    num_rows, top_k = position_RK.shape
    out_RH = rows_AH.new_empty(num_rows, hidden, dtype=dtype)
    block = min(next_power_of_2(hidden), 2048)
    launch(
        combine_kernel, (num_rows, cdiv(hidden, block)),
        _list_combine_constants(top_k, weights_RK is not None, block),
        rows_AH, position_RK, weights_RK, out_RH, num_pairs, hidden, rows_AH.stride(0),
    )  # fmt: skip
    return out_RH


@functools.cache
def _list_combine_constants(top_k: int, weighted: bool, block: int) -> Constants:
    return Constants(TOP_K=top_k, WEIGHTED=weighted, BLOCK=block, num_warps=4)


def weight_grads(partial_CA: Tensor, routing: Routing, like_RK: Tensor) -> Tensor:
    """Return the gradient of the routing weights, zero for pairs without an expert here."""
    num_column_blocks, num_pairs = partial_CA.shape
    out_RK = torch.empty_like(like_RK, memory_format=torch.contiguous_format)
    num_weights = out_RK.numel()
    launch(
        weight_grads_kernel, (cdiv(num_weights, _WEIGHTS),), _WEIGHTS_CONSTANTS,
        partial_CA, routing.position_RK, out_RK, num_pairs, num_column_blocks, num_weights,
    )  # fmt: skip
    return out_RK


def segment_sum(
    rows: Tensor,
    weights_RK: Tensor | None,
    routing: Routing,
    out_LO: Tensor,
    *,
    scale: float,
    gather: bool,
) -> None:
    """Compute `out_LO`, the gradient of a bias.

    With `gather` the kernel loads the row of each pair by its number. Otherwise `rows` has one row
    per pair, in the order of the sorted pairs.
    """
    num_experts, width = out_LO.shape
    launch(
        segment_sum_kernel, (num_experts, cdiv(width, _SUM_COLUMNS)),
        _list_sum_constants(gather, weights_RK is not None),
        rows, routing.pair_A, routing.row_A, weights_RK, routing.offsets, out_LO, width,
        rows.stride(0), scale,
    )  # fmt: skip


@functools.cache
def _list_sum_constants(gather: bool, weighted: bool) -> Constants:
    return Constants(GATHER=gather, WEIGHTED=weighted, BLOCK_M=_SUM_ROWS, BLOCK_N=_SUM_COLUMNS)
