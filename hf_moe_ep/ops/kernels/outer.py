"""Compute the gradients of the experts' weights, each a sum of outer products.

The (row, expert) pairs are sorted by expert (`ops/interface.py`). For each expert l, with one row
of `left` and one row of `right` per pair of this expert:

    out[l] = scale * left[pairs of l]^T right[pairs of l]         with `add`: += instead of =

`left` has one row per pair, in sorted order. With `gather_left`, `left` has the rows before the
sort, and the kernel loads the row of each pair by its number. `gather_right` does the same for
`right`. Without `add`, an expert without pairs gets exact zeros. Programs of the busiest experts
start first, because their loops are longest.

With `thin`, `out` is the gradient of a LoRA factor, and the block sizes fit a small last dimension:
the rank of the adapter. If the rank is the first dimension of the factor, the caller passes a
transposed view of the factor's gradient as `out`.

With `add`, `out` is fp32. A launch adds to each element exactly once, so the sum does not depend on
the order in which programs run. The additions are atomic only because atomic additions need no
registers for the old values.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import Routing
from hf_moe_ep.ops.kernels.blocks import (
    Blocks,
    OuterBlock,
    choose_compiler_options,
    fit_rank,
    get_dot_precision,
)
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch
from hf_moe_ep.ops.kernels.product import describe_row_blocks


@triton.jit
def _add_step(
    sums, left, right, left_blocks, right_blocks, row_of_position, first, end, first_m, first_n,
    height, width, left_stride, right_stride,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of up to BLOCK_K pairs, from position `first` on, to `sums` and return them.

    WHOLE promises that all BLOCK_K positions are below `end`, so that loads need no mask for
    positions. Only with WHOLE, a factor that has a TMA descriptor is loaded through the descriptor.
    """
    position = first + tl.arange(0, BLOCK_K)
    o_m = first_m + tl.arange(0, sums.shape[0])
    o_n = first_n + tl.arange(0, sums.shape[1])
    if GATHER_LEFT or GATHER_RIGHT:
        if WHOLE:
            row = tl.load(row_of_position + position)  # [K]
        else:
            row = tl.load(row_of_position + position, mask=position < end, other=0)  # [K]
    left_row = row if GATHER_LEFT else position
    right_row = row if GATHER_RIGHT else position
    p_left = left + left_row.to(tl.int64)[:, None] * left_stride + o_m[None, :]  # [K, M]
    p_right = right + right_row.to(tl.int64)[:, None] * right_stride + o_n[None, :]  # [K, N]
    m_left = (o_m < height)[None, :]
    m_right = (o_n < width)[None, :]
    if not WHOLE:
        m_left = m_left & (position < end)[:, None]
        m_right = m_right & (position < end)[:, None]
    if WHOLE and left_blocks is not None:
        b_left = left_blocks.load([first, first_m])  # [K, M]
    elif WHOLE and EVEN_M:
        b_left = tl.load(p_left)  # [K, M]
    else:
        b_left = tl.load(p_left, mask=m_left, other=0.0)  # [K, M]
    if WHOLE and right_blocks is not None:
        b_right = right_blocks.load([first, first_n])  # [K, N]
    elif WHOLE and EVEN_N:
        b_right = tl.load(p_right)  # [K, N]
    else:
        b_right = tl.load(p_right, mask=m_right, other=0.0)  # [K, N]
    return tl.dot(tl.trans(b_left), b_right, sums, input_precision=PRECISION)


@triton.jit
def outer_kernel(
    left, right, left_blocks, right_blocks, row_of_position, offsets, order, out,
    height, width, left_stride, right_stride,
    out_stride_l, out_stride_m, out_stride_n, scale,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(height, BLOCK_M)
    num_n = tl.cdiv(width, BLOCK_N)
    expert = tl.load(order + tl.program_id(0) // (num_m * num_n))
    block = tl.program_id(0) % (num_m * num_n)
    first_m = (block // num_n) * BLOCK_M
    first_n = (block % num_n) * BLOCK_N
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    # Only the last step can have fewer than BLOCK_K pairs. It follows the loop, so that the steps
    # in the loop need no mask for pairs.
    last = start + (end - start) // BLOCK_K * BLOCK_K
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, last, BLOCK_K):
        sums = _add_step(
            sums, left, right, left_blocks, right_blocks, row_of_position, first, end,
            first_m, first_n, height, width, left_stride, right_stride,
            GATHER_LEFT, GATHER_RIGHT, True, BLOCK_K, EVEN_M, EVEN_N, PRECISION,
        )  # fmt: skip
    if last < end:
        sums = _add_step(
            sums, left, right, left_blocks, right_blocks, row_of_position, last, end,
            first_m, first_n, height, width, left_stride, right_stride,
            GATHER_LEFT, GATHER_RIGHT, False, BLOCK_K, EVEN_M, EVEN_N, PRECISION,
        )  # fmt: skip
    o_m = first_m + tl.arange(0, BLOCK_M)
    o_n = first_n + tl.arange(0, BLOCK_N)
    out += expert.to(tl.int64) * out_stride_l
    o_row = o_m.to(tl.int64)[:, None] * out_stride_m
    o_column = o_n.to(tl.int64)[None, :] * out_stride_n
    m_out = (o_m < height)[:, None] & (o_n < width)[None, :]
    if ADD:
        tl.atomic_add(out + o_row + o_column, sums * scale, mask=m_out, sem="relaxed")
    else:
        tl.store(out + o_row + o_column, (sums * scale).to(out.dtype.element_ty), mask=m_out)


def outer(
    left: Tensor,
    right: Tensor,
    out_LOI: Tensor,
    routing: Routing,
    order_L: Tensor,
    blocks: Blocks,
    *,
    scale: float,
    gather_left: bool = False,
    gather_right: bool = False,
    thin: bool = False,
    add: bool = False,
) -> None:
    """Store the sums of the module docstring in `out_LOI`, or with `add` add them to `out_LOI`.

    `out_LOI` may have any strides, but each row of `left` and `right` must be contiguous. `order_L`
    has the experts in the order in which their programs start.
    """
    num_experts, height, width = out_LOI.shape
    block: OuterBlock = blocks.thin_outer if thin else blocks.outer
    block_m, block_n = block.m, block.n
    if thin:
        block_n = fit_rank(width, block_n)
    elif gather_right:
        block_m, block_n = block_n, block_m
    grid = (num_experts * cdiv(height, block_m) * cdiv(width, block_n),)
    left_blocks = None if gather_left else describe_row_blocks(left, block, block.k, block_m)
    right_blocks = None if gather_right else describe_row_blocks(right, block, block.k, block_n)
    constants = _list_constants(
        block, block_m, block_n, gather_left, gather_right,
        height % block_m == 0, width % block_n == 0, add, get_dot_precision(left),
    )  # fmt: skip
    launch(
        outer_kernel, grid, constants,
        left, right, left_blocks, right_blocks, routing.row_A, routing.offsets, order_L, out_LOI,
        height, width, left.stride(0), right.stride(0), *out_LOI.stride(), scale,
    )  # fmt: skip


@functools.cache
def _list_constants(
    block: OuterBlock, block_m: int, block_n: int, gather_left: bool, gather_right: bool,
    even_m: bool, even_n: bool, add: bool, precision: str,
) -> Constants:  # fmt: skip
    return Constants(
        GATHER_LEFT=gather_left, GATHER_RIGHT=gather_right,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block.k,
        EVEN_M=even_m, EVEN_N=even_n, ADD=add, PRECISION=precision,
        **choose_compiler_options(block),
    )  # fmt: skip
