"""Compute out_AO[a] = rows_AI[a] @ matrix[expert of a] for all experts in one launch.

The rows are sorted by expert.

    grouped_mm   computes the down projection (with its bias) and the gradient of the rows. The
                 second product of an adapter adds a few steps to the same sum.
    thin_mm      computes the first product of an adapter, times the adapter's scale. The kernel can
                 gather the rows.

The matrix is read through its strides, so neither forward nor backward copies a weight.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.interface import NO_ADAPTER, LowRows, Routing
from hf_moe_ep.ops.kernels.blocks import (
    Block,
    Blocks,
    choose_compiler_options,
    fit_rank,
    get_dot_precision,
)
from hf_moe_ep.ops.kernels.dequantise import (
    ByteMatrices,
    Matrices,
    list_matrix_arguments,
    list_matrix_constants,
    multiply_quantised,
)
from hf_moe_ep.ops.kernels.epilogue import add_low_rank
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch
from hf_moe_ep.ops.kernels.product import describe_matrix_blocks, describe_row_blocks, multiply_tile
from hf_moe_ep.ops.kernels.sort_pairs import open_tile


@triton.jit
def grouped_mm_kernel(
    rows, row_of_position, offsets, tiles, matrix, matrix_scale, bias, out,
    inner, width, row_stride,
    matrix_stride_l, matrix_stride_k, matrix_stride_n, bias_stride_l,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_n, scale,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, BLOCK_P: tl.constexpr, SCALED: tl.constexpr,
    ROWS_IN_BLOCKS: tl.constexpr, MATRIX_BLOCKS: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, start, num_left, column = open_tile(tiles, offsets, width, BLOCK_N)
    if expert < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    # Rows after the expert's last pair repeat that pair, and their results are not stored.
    position = start + tl.minimum(o_m, num_left - 1)  # [M]
    o_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND != "":
        sums = multiply_quantised(
            rows, row_of_position, row_stride, matrix, matrix_scale,
            expert, position, inner, o_n, column, width,
            KIND, NATIVE, BACK, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
    else:
        sums = multiply_tile(
            rows, row_of_position, row_stride, matrix,
            matrix_stride_l, matrix_stride_k, matrix_stride_n,
            expert, start, position, inner, o_n, column * BLOCK_N, width,
            ROWS_IN_BLOCKS, MATRIX_BLOCKS, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
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
    m_out = (o_m < num_left)[:, None] & (o_n < width)[None, :]
    tl.store(p_out, sums.to(out.dtype.element_ty), mask=m_out)


def grouped_mm(
    rows_AI: Tensor,
    matrix_LIO: Matrices,
    bias_LO: Tensor | None,
    routing: Routing,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
    *,
    back: bool = False,
) -> Tensor:
    """Return out_AO in the dtype of `rows_AI`.

    `rows_AI` must be contiguous, and the matrices may have any strides. With `back` the rows are
    gradients of up's output, otherwise they are inputs of down.
    """
    out_AO = rows_AI.new_empty(rows_AI.shape[0], matrix_LIO.shape[2])
    block = blocks.rows if back else blocks.down
    _launch(rows_AI, None, matrix_LIO, bias_LO, out_AO, routing, blocks, block, block.n, low)
    return out_AO


def thin_mm(
    rows: Tensor,
    matrix_LIP: Tensor,
    routing: Routing,
    blocks: Blocks,
    *,
    scale: float,
    gather: bool = False,
) -> Tensor:
    """Return out_AP = scale * rows @ matrix. With `gather` the kernel loads the row of each pair.

    Each row must be contiguous. With `gather`, the stride between rows may have any value.
    """
    out_AP = rows.new_empty(routing.pair_A.numel(), matrix_LIP.shape[2])
    block, row_A = blocks.thin, routing.row_A if gather else None
    columns = fit_rank(matrix_LIP.shape[2], block.n)
    _launch(rows, row_A, matrix_LIP, None, out_AP, routing, blocks, block, columns, scale=scale)
    return out_AP


def _launch(
    rows: Tensor,
    row_A: Tensor | None,
    matrix_LIO: Matrices,
    bias_LO: Tensor | None,
    out_AO: Tensor,
    routing: Routing,
    blocks: Blocks,
    block: Block,
    columns: int,
    low: LowRows = NO_ADAPTER,
    *,
    scale: float | None = None,
) -> None:
    """Launch the kernel with `columns` columns per program instead of those of `block`."""
    inner, width = matrix_LIO.shape[1:]
    values, scales, *strides = list_matrix_arguments(matrix_LIO)
    matrix, block_name = None, ""
    if scales is None:
        matrix, block_name = describe_matrix_blocks(values, block, columns)
    rows_in_blocks = None
    if block_name and row_A is None:
        rows_in_blocks = describe_row_blocks(rows, block, blocks.m, block.k)
    grid = (routing.tiles.shape[0] * cdiv(width, columns),)
    constants = _list_constants(
        block, blocks.m, columns, low.rank, blocks.rank, block_name, rows_in_blocks is not None,
        *list_matrix_constants(matrix_LIO),
        isinstance(matrix_LIO, ByteMatrices) and not matrix_LIO.transposed,
        bias_LO is not None, scale is not None,
        width % columns == 0, inner % block.k == 0, get_dot_precision(rows),
    )  # fmt: skip
    launch(
        grouped_mm_kernel, grid, constants,
        rows_in_blocks or rows, row_A, routing.offsets, routing.tiles, matrix or values, scales,
        bias_LO, out_AO, inner, width, rows.stride(0), *strides,
        0 if bias_LO is None else bias_LO.stride(0), *low.list_kernel_arguments(),
        1.0 if scale is None else scale,
    )  # fmt: skip


@functools.cache
def _list_constants(
    block: Block, block_m: int, columns: int, rank: int, most_rank: int, block_name: str,
    rows_in_blocks: bool, kind: str, native: bool, back: bool, has_bias: bool, scaled: bool,
    even_n: bool, even_k: bool, precision: str,
) -> Constants:  # fmt: skip
    return Constants(
        HAS_BIAS=has_bias, RANK=rank, BLOCK_P=fit_rank(rank, most_rank), SCALED=scaled,
        ROWS_IN_BLOCKS=rows_in_blocks, MATRIX_BLOCKS=block_name,
        KIND=kind, NATIVE=native, BACK=back,
        BLOCK_M=block_m, BLOCK_N=columns, BLOCK_K=block.k,
        EVEN_N=even_n, EVEN_K=even_k, PRECISION=precision, **choose_compiler_options(block),
    )  # fmt: skip
