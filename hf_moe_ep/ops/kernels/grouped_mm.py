"""out_AO[a] = rows_AI[a] @ matrix[expert of a]: rows sorted by expert, one launch for all experts.

    grouped_mm   the down projection (with its bias) and the gradient of the rows; an adapter is a
                 few more steps of the same sum
    thin_mm      the first product of an adapter, scaled; where need be it gathers its rows

The matrix is read through its strides, so a weight serves as it lies for both directions.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import NO_ADAPTER, LowRows, Routing
from hf_moe_ep.ops.kernels.blocks import Block, Blocks, dot_precision, rank_block
from hf_moe_ep.ops.kernels.gate import add_low_rank
from hf_moe_ep.ops.kernels.sort_pairs import open_tile


@triton.jit
def grouped_mm_kernel(
    rows, offsets, tiles, matrix, bias, out,
    inner, width,
    matrix_stride_l, matrix_stride_k, matrix_stride_n, bias_stride_l,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_n,
    pair_of_position, top_k, row_stride, scale,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, BLOCK_P: tl.constexpr,
    GATHER: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, start, left, column = open_tile(tiles, offsets, width, BLOCK_N)
    if expert < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    # What lies behind the expert's last pair reads that pair again, and is not stored.
    position = start + tl.minimum(o_m, left - 1)  # [M]
    o_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    if GATHER:
        row = tl.load(pair_of_position + position) // top_k  # [M]
        p_x = rows + row.to(tl.int64)[:, None] * row_stride + o_k[None, :]  # [M, K]
    else:
        p_x = rows + position.to(tl.int64)[:, None] * inner + o_k[None, :]  # [M, K]
    matrix += expert.to(tl.int64) * matrix_stride_l
    p_w = matrix + o_k[:, None] * matrix_stride_k + o_n[None, :] * matrix_stride_n  # [K, N]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, inner, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x)  # [M, K]
        else:
            b_x = tl.load(p_x, mask=(step + o_k < inner)[None, :], other=0.0)  # [M, K]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)  # [K, N]
        else:
            m_w = (step + o_k < inner)[:, None] & (o_n < width)[None, :]
            b_w = tl.load(p_w, mask=m_w, other=0.0)  # [K, N]
        sums = tl.dot(b_x, b_w, sums, input_precision=PRECISION)
        p_x += BLOCK_K
        p_w += BLOCK_K * matrix_stride_k
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        sums = add_low_rank(
            sums, low, position, low_b, o_n, width,
            low_b_stride_p, low_b_stride_n, RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
    if SCALED:
        sums *= scale
    if HAS_BIAS:
        p_bias = bias + expert.to(tl.int64) * bias_stride_l + o_n
        b_bias = tl.load(p_bias, mask=o_n < width, other=0.0)  # [N]
        sums += b_bias.to(tl.float32)[None, :]
    p_out = out + (start + o_m).to(tl.int64)[:, None] * width + o_n[None, :]  # [M, N]
    m_out = (o_m < left)[:, None] & (o_n < width)[None, :]
    tl.store(p_out, sums.to(out.dtype.element_ty), mask=m_out)


def grouped_mm(
    rows_AI: Tensor,
    matrix_LIO: Tensor,
    bias_LO: Tensor | None,
    routing: Routing,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
) -> Tensor:
    """out_AO in the dtype of `rows_AI`, which is contiguous; the matrix has any strides."""
    out_AO = rows_AI.new_empty(rows_AI.shape[0], matrix_LIO.shape[2])
    _launch(rows_AI, matrix_LIO, bias_LO, out_AO, routing, blocks, blocks.matmul, low)
    return out_AO


def thin_mm(
    rows: Tensor,
    matrix_LIP: Tensor,
    routing: Routing,
    blocks: Blocks,
    *,
    scale: float,
    gather_top_k: int | None = None,
) -> Tensor:
    """out_AP = scale * rows_AI @ matrix, or of the rows of each pair where `gather_top_k` is
    given. Rows are contiguous; gathered ones may have any distance.
    """
    out_AP = rows.new_empty(routing.pair_A.numel(), matrix_LIP.shape[2])
    block = replace(blocks.thin, n=rank_block(matrix_LIP.shape[2], blocks.thin.n))
    _launch(rows, matrix_LIP, None, out_AP, routing, blocks, block, scale=scale, top_k=gather_top_k)
    return out_AP


def _launch(
    rows: Tensor,
    matrix_LIO: Tensor,
    bias_LO: Tensor | None,
    out_AO: Tensor,
    routing: Routing,
    blocks: Blocks,
    block: Block,
    low: LowRows = NO_ADAPTER,
    *,
    scale: float | None = None,
    top_k: int | None = None,
) -> None:
    inner, width = matrix_LIO.shape[1:]
    grid = (routing.tiles.shape[0] * triton.cdiv(width, block.n),)
    grouped_mm_kernel[grid](
        rows, routing.offsets, routing.tiles, matrix_LIO, bias_LO, out_AO, inner, width,
        *matrix_LIO.stride(), 0 if bias_LO is None else bias_LO.stride(0),
        *low.kernel_arguments(),
        routing.pair_A, top_k or 1, rows.stride(0), 1.0 if scale is None else scale,
        HAS_BIAS=bias_LO is not None, RANK=low.rank, BLOCK_P=rank_block(low.rank, blocks.rank),
        GATHER=top_k is not None, SCALED=scale is not None,
        BLOCK_M=blocks.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=width % block.n == 0, EVEN_K=inner % block.k == 0,
        PRECISION=dot_precision(rows), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
