"""Multiply the rows of a tile by the matrix of its expert, in `up`, `grouped_mm` and `dgated`.

`multiply_tile` loads its factors through pointers or, where `describe_row_blocks` and
`describe_matrix_blocks` return a TMA descriptor, as whole blocks. Loading a block needs no
addresses in registers and far fewer instructions. Gathered rows are always loaded through pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_moe_ep.ops.kernels.blocks import Block


class CheckedDescriptor(TensorDescriptor):
    """A descriptor that is not checked when it is made, which takes the host longer than the rest.

    The functions below check its address and strides. Its block sizes are powers of two by the
    table of blocks.
    """

    def __post_init__(self) -> None:
        pass


# TMA needs addresses, and strides in bytes, that are multiples of 16.
_ALIGNMENT = 16


@triton.jit
def multiply_tile(
    rows, row_of_position, row_stride, matrix, stride_l, stride_k, stride_n,
    expert, start, position, inner, o_n, first_n, limit_n,
    ROWS_IN_BLOCKS: tl.constexpr, MATRIX_BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sums [M, N] in fp32: rows at `position` [M] times columns `o_n` [N] of the matrix.

    Columns from `limit_n` on have any value. If `row_of_position` is None, rows are in the order of
    the positions. With ROWS_IN_BLOCKS `rows` is a descriptor, and the rows from `start` on are
    loaded. The last tile of an expert then also computes sums for rows of the next expert.

    MATRIX_BLOCKS is "" if `matrix` is a pointer, and otherwise names the blocks of a descriptor:

        "kn"        [K, N], the columns from `first_n` on
        "nk"        [N, K], the same columns of a matrix whose memory is transposed
        "halves"    [2, N / 2, K], like "nk", but N / 2 columns of each half of the matrix
    """
    o_row = position if row_of_position is None else tl.load(row_of_position + position)  # [M]
    o_k = tl.arange(0, BLOCK_K)
    if not ROWS_IN_BLOCKS:
        p_x = rows + o_row.to(tl.int64)[:, None] * row_stride + o_k[None, :]  # [M, K]
    if MATRIX_BLOCKS == "":
        matrix += expert.to(tl.int64) * stride_l
        p_w = matrix + o_k[:, None] * stride_k + o_n[None, :] * stride_n  # [K, N]
    WIDTH: tl.constexpr = o_n.shape[0]
    sums = tl.zeros([position.shape[0], WIDTH], tl.float32)
    # Without this hint Triton expects that the loop may have zero steps. If an adapter's product
    # follows in the same registers, Triton 3.6 on sm_90 then waits for each product of the loop.
    tl.assume(inner > 0)
    for step in range(0, inner, BLOCK_K):
        if ROWS_IN_BLOCKS:
            b_x = rows.load([start, step])  # [M, K]
        elif EVEN_K:
            b_x = tl.load(p_x)  # [M, K]
        else:
            b_x = tl.load(p_x, mask=(step + o_k < inner)[None, :], other=0.0)  # [M, K]
        if MATRIX_BLOCKS == "kn":
            b_w = matrix.load([expert * inner + step, first_n])  # [K, N]
        elif MATRIX_BLOCKS == "nk":
            b_w = tl.trans(matrix.load([expert * limit_n + first_n, step]))  # [K, N]
        elif MATRIX_BLOCKS == "halves":
            b_halves = matrix.load([2 * expert, first_n, step])  # [2, N / 2, K]
            b_w = tl.trans(tl.reshape(b_halves, (WIDTH, BLOCK_K)))  # [K, N]
        elif EVEN_N and EVEN_K:
            b_w = tl.load(p_w)  # [K, N]
        else:
            m_w = (o_n < limit_n)[None, :]  # [1 or K, N]
            if not EVEN_K:
                m_w = m_w & (step + o_k < inner)[:, None]
            b_w = tl.load(p_w, mask=m_w, other=0.0)  # [K, N]
        sums = tl.dot(b_x, b_w, sums, input_precision=PRECISION)
        if not ROWS_IN_BLOCKS:
            p_x += BLOCK_K
        if MATRIX_BLOCKS == "":
            p_w += BLOCK_K * stride_k
    return sums


def describe_row_blocks(
    rows: Tensor, block: Block, num_rows: int, columns: int
) -> TensorDescriptor | None:
    """Return a TMA descriptor for blocks of [num_rows, columns], or None.

    The result is None, and the rows are loaded through pointers, if `block.tma` is False or the
    rows are not aligned or not contiguous.
    """
    if not block.tma or not _is_aligned(rows) or rows.stride(1) != 1:
        return None
    return CheckedDescriptor(rows, rows.shape, rows.stride(), [num_rows, columns])


def describe_matrix_blocks(
    matrix_LIO: Tensor, block: Block, width: int, *, in_halves: bool = False
) -> tuple[TensorDescriptor | None, str]:
    """Return a descriptor and the constant MATRIX_BLOCKS of `multiply_tile`, or (None, "").

    A block has `width` columns. With `in_halves` they are `width / 2` columns of the first half of
    the matrix, and the same columns of the second half.
    """
    if not block.tma:
        return None, ""
    experts, inner, outer = matrix_LIO.shape
    if inner % block.k or not tma_can_load(matrix_LIO):
        return None, ""
    # The descriptors are written here, because views of the matrix would take the host longer.
    if matrix_LIO.stride(1) == 1:
        if not in_halves:
            rows = CheckedDescriptor(
                matrix_LIO, [experts * outer, inner], [inner, 1], [width, block.k]
            )
            return rows, "nk"
        shape, strides = [2 * experts, outer // 2, inner], [outer // 2 * inner, inner, 1]
        return CheckedDescriptor(matrix_LIO, shape, strides, [2, width // 2, block.k]), "halves"
    if in_halves:
        return None, ""
    columns = CheckedDescriptor(matrix_LIO, [experts * inner, outer], [outer, 1], [block.k, width])
    return columns, "kn"


def tma_can_load(matrix_LIO: Tensor) -> bool:
    """Return True if the matrices, or their transposes, are contiguous and aligned."""
    _, inner, outer = matrix_LIO.shape
    # Comparing strides takes the host less time than the questions after it, which also know that
    # the stride of a dimension of size 1 does not matter.
    usual = (inner * outer, outer, 1), (inner * outer, 1, inner)
    contiguous = matrix_LIO.stride() in usual
    contiguous = contiguous or matrix_LIO.is_contiguous() or matrix_LIO.mT.is_contiguous()
    return contiguous and _is_aligned(matrix_LIO)


def _is_aligned(x: Tensor) -> bool:
    size = x.element_size()
    for stride in x.stride():
        if stride != 1 and stride * size % _ALIGNMENT:
            return False
    return x.data_ptr() % _ALIGNMENT == 0
