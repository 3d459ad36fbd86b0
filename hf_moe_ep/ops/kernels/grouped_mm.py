"""out_AN[a] = rows_AK[a] @ matrix[expert of a]: rows sorted by expert, one launch for all experts.

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
    num_n = tl.cdiv(width, BLOCK_N)
    tile, column = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    expert = tl.load(tiles + 2 * tile)
    if expert < 0:
        return
    position = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_M)
    end = tl.load(offsets + expert + 1)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if GATHER:
        row = tl.load(pair_of_position + tl.minimum(position, end - 1)) // top_k
        x_ptrs = rows + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    else:
        x_ptrs = rows + tl.minimum(position, end - 1).to(tl.int64)[:, None] * inner + k[None, :]
    matrix += expert.to(tl.int64) * matrix_stride_l
    w_ptrs = matrix + k[:, None] * matrix_stride_k + n[None, :] * matrix_stride_n
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, inner, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(step + k < inner)[None, :], other=0.0)
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs)
        else:
            inside = (step + k < inner)[:, None] & (n < width)[None, :]
            w = tl.load(w_ptrs, mask=inside, other=0.0)
        sums = tl.dot(x, w, sums, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * matrix_stride_k
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        sums = add_low_rank(
            sums, low, tl.minimum(position, end - 1), low_b, n, width,
            low_b_stride_p, low_b_stride_n, RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
    if SCALED:
        sums *= scale
    if HAS_BIAS:
        b_ptrs = bias + expert.to(tl.int64) * bias_stride_l + n
        sums += tl.load(b_ptrs, mask=n < width, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out + position.to(tl.int64)[:, None] * width + n[None, :]
    stored = (position < end)[:, None] & (n < width)[None, :]
    tl.store(out_ptrs, sums.to(out.dtype.element_ty), mask=stored)


def grouped_mm(
    rows_AK: Tensor,
    matrix_LKN: Tensor,
    bias_LN: Tensor | None,
    routing: Routing,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
) -> Tensor:
    """out_AN in the dtype of `rows_AK`, which is contiguous; the matrix has any strides."""
    out_AN = rows_AK.new_empty(rows_AK.shape[0], matrix_LKN.shape[2])
    _launch(rows_AK, matrix_LKN, bias_LN, out_AN, routing, blocks, blocks.matmul, low)
    return out_AN


def thin_mm(
    rows: Tensor,
    matrix_LKP: Tensor,
    routing: Routing,
    blocks: Blocks,
    *,
    scale: float,
    gather_top_k: int | None = None,
) -> Tensor:
    """out_AP = scale * rows_AK @ matrix, or of the rows_RK of each pair where `gather_top_k` is
    given. Rows are contiguous; gathered ones may have any distance.
    """
    out_AP = rows.new_empty(routing.pair_A.numel(), matrix_LKP.shape[2])
    block = replace(blocks.thin, n=rank_block(matrix_LKP.shape[2], blocks.thin.n))
    _launch(rows, matrix_LKP, None, out_AP, routing, blocks, block, scale=scale, top_k=gather_top_k)
    return out_AP


def _launch(
    rows: Tensor,
    matrix_LKN: Tensor,
    bias_LN: Tensor | None,
    out_AN: Tensor,
    routing: Routing,
    blocks: Blocks,
    block: Block,
    low: LowRows = NO_ADAPTER,
    *,
    scale: float | None = None,
    top_k: int | None = None,
) -> None:
    inner, width = matrix_LKN.shape[1:]
    grid = (routing.tiles.shape[0] * triton.cdiv(width, block.n),)
    grouped_mm_kernel[grid](
        rows, routing.offsets, routing.tiles, matrix_LKN, bias_LN, out_AN, inner, width,
        *matrix_LKN.stride(), 0 if bias_LN is None else bias_LN.stride(0),
        *low.kernel_arguments(),
        routing.pair_A, top_k or 1, rows.stride(0), 1.0 if scale is None else scale,
        HAS_BIAS=bias_LN is not None, RANK=low.rank, BLOCK_P=rank_block(low.rank, blocks.rank),
        GATHER=top_k is not None, SCALED=scale is not None,
        BLOCK_M=blocks.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=width % block.n == 0, EVEN_K=inner % block.k == 0,
        PRECISION=dot_precision(rows), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
