"""out[l] = scale * left^T right over the pairs of expert l: the gradient of a weight.

Either side is a buffer in pair order, or rows that are gathered on the way in. An expert without
pairs gets exact zeros. Programs of the busiest experts start first: theirs are the longest loops.
Of an adapter's factors the side of the rank is the right one, `thin`; a gradient that has it the
other way round is filled as a transposed view.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import Routing
from hf_moe_ep.ops.kernels.blocks import Blocks, OuterBlock, dot_precision, rank_block


@triton.jit
def outer_kernel(
    left, right, pair_of_position, offsets, order, out,
    top_k, height, width, left_stride, right_stride,
    out_stride_l, out_stride_m, out_stride_n, scale,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_m, num_n = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    expert = tl.load(order + tl.program_id(0) // (num_m * num_n))
    block = tl.program_id(0) % (num_m * num_n)
    m = (block // num_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (block % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        position = first + tl.arange(0, BLOCK_K)
        inside = position < end
        left_row = position
        right_row = position
        if GATHER_LEFT or GATHER_RIGHT:
            row = tl.load(pair_of_position + position, mask=inside, other=0) // top_k
            left_row = row if GATHER_LEFT else position
            right_row = row if GATHER_RIGHT else position
        l_ptrs = left + left_row.to(tl.int64)[:, None] * left_stride + m[None, :]
        r_ptrs = right + right_row.to(tl.int64)[:, None] * right_stride + n[None, :]
        l_mask = inside[:, None] if EVEN_M else inside[:, None] & (m < height)[None, :]
        r_mask = inside[:, None] if EVEN_N else inside[:, None] & (n < width)[None, :]
        left_rows = tl.load(l_ptrs, mask=l_mask, other=0.0)
        right_rows = tl.load(r_ptrs, mask=r_mask, other=0.0)
        sums = tl.dot(tl.trans(left_rows), right_rows, sums, input_precision=PRECISION)
    out += expert.to(tl.int64) * out_stride_l
    out_ptrs = out + m.to(tl.int64)[:, None] * out_stride_m + n.to(tl.int64)[None, :] * out_stride_n
    stored = (m < height)[:, None] & (n < width)[None, :]
    tl.store(out_ptrs, (sums * scale).to(out.dtype.element_ty), mask=stored)


def outer(
    left: Tensor,
    right: Tensor,
    out_LMN: Tensor,
    routing: Routing,
    order_L: Tensor,
    top_k: int,
    blocks: Blocks,
    *,
    scale: float,
    gather_left: bool = False,
    gather_right: bool = False,
    thin: bool = False,
) -> Tensor:
    """Fills and returns `out_LMN`, of any strides; `left` and `right` have contiguous rows."""
    num_experts, height, width = out_LMN.shape
    block: OuterBlock = blocks.outer
    if thin:
        block = replace(blocks.thin_outer, n=rank_block(width, blocks.thin_outer.n))
    grid = (num_experts * triton.cdiv(height, block.m) * triton.cdiv(width, block.n),)
    outer_kernel[grid](
        left, right, routing.pair_A, routing.offsets, order_L, out_LMN,
        top_k, height, width, left.stride(0), right.stride(0), *out_LMN.stride(), scale,
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right,
        BLOCK_M=block.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_M=height % block.m == 0, EVEN_N=width % block.n == 0,
        PRECISION=dot_precision(left), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return out_LMN
