"""out_AN[a] = rows_AK[a] @ matrix[expert of a]: rows sorted by expert, one launch for all experts.

The down projection (with its bias) and the gradient of the rows. The matrix is read through its
strides, so a weight serves as it lies for both directions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.blocks import Block, Blocks, dot_precision
from hf_moe_ep.ops.weights import Routing


@triton.jit
def grouped_mm_kernel(
    rows, offsets, tiles, matrix, bias, out,
    inner, width,
    matrix_stride_l, matrix_stride_k, matrix_stride_n, bias_stride_l,
    HAS_BIAS: tl.constexpr,
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
    if HAS_BIAS:
        b_ptrs = bias + expert.to(tl.int64) * bias_stride_l + n
        sums += tl.load(b_ptrs, mask=n < width, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out + position.to(tl.int64)[:, None] * width + n[None, :]
    stored = (position < end)[:, None] & (n < width)[None, :]
    tl.store(out_ptrs, sums.to(out.dtype.element_ty), mask=stored)


def grouped_mm(
    rows_AK: Tensor, matrix_LKN: Tensor, bias_LN: Tensor | None, routing: Routing, blocks: Blocks
) -> Tensor:
    """out_AN in the dtype of `rows_AK`, which is contiguous; the matrix has any strides."""
    num_pairs, inner = rows_AK.shape
    width = matrix_LKN.shape[2]
    out_AN = rows_AK.new_empty(num_pairs, width)
    block: Block = blocks.matmul
    grid = (routing.tiles.shape[0] * triton.cdiv(width, block.n),)
    grouped_mm_kernel[grid](
        rows_AK, routing.offsets, routing.tiles, matrix_LKN, bias_LN, out_AN, inner, width,
        *matrix_LKN.stride(), 0 if bias_LN is None else bias_LN.stride(0),
        HAS_BIAS=bias_LN is not None,
        BLOCK_M=blocks.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=width % block.n == 0, EVEN_K=inner % block.k == 0,
        PRECISION=dot_precision(rows_AK), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return out_AN
