"""The main loop of `up`, `grouped_mm` and `dgated`: rows of a tile times the matrix of its expert.

Both functions compute sums[m, n] = sum over k of x[m, k] * w[k, n] in fp32. `tile_product` can
gather its rows, and `block_product` loads through TMA descriptors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_product(
    rows, row_of_position, row_stride, matrix, stride_l, stride_k, stride_n,
    expert, position, inner, o_n, limit_n,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [M, N]: rows at `position` [M] times columns `o_n` [N] of the expert's matrix.

    Columns from `limit_n` on are 0. If `row_of_position` is None, rows are in the order of the
    positions.
    """
    o_row = position if row_of_position is None else tl.load(row_of_position + position)  # [M]
    o_k = tl.arange(0, BLOCK_K)
    p_x = rows + o_row.to(tl.int64)[:, None] * row_stride + o_k[None, :]  # [M, K]
    matrix += expert.to(tl.int64) * stride_l
    p_w = matrix + o_k[:, None] * stride_k + o_n[None, :] * stride_n  # [K, N]
    sums = tl.zeros([position.shape[0], o_n.shape[0]], tl.float32)
    # Without this hint Triton allows for a loop of zero steps. If an adapter's product follows in
    # the same registers, Triton 3.6 on sm_90 then waits for each product before the next product.
    tl.assume(inner > 0)
    for step in range(0, inner, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x)  # [M, K]
        else:
            b_x = tl.load(p_x, mask=(step + o_k < inner)[None, :], other=0.0)  # [M, K]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)  # [K, N]
        else:
            m_w = (o_n < limit_n)[None, :]  # [1 or K, N]
            if not EVEN_K:
                m_w = m_w & (step + o_k < inner)[:, None]
            b_w = tl.load(p_w, mask=m_w, other=0.0)  # [K, N]
        sums = tl.dot(b_x, b_w, sums, input_precision=PRECISION)
        p_x += BLOCK_K
        p_w += BLOCK_K * stride_k
    return sums


@triton.jit
def block_product(
    rows, matrix, start, matrix_row, matrix_column, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [M, N]: rows from `start` on times a block of columns of the matrix.

    `rows` and `matrix` are TMA descriptors.

    `inner` is a multiple of BLOCK_K. An expert's last tile also reads rows of the next expert, or
    reads past the last row; the sums of these rows are not stored.
    """
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    tl.assume(inner > 0)
    for step in range(0, inner, BLOCK_K):
        b_x = rows.load([start, step])  # [M, K]
        b_w = matrix.load([matrix_row + step, matrix_column])  # [K, N]
        sums = tl.dot(b_x, b_w, sums, input_precision=PRECISION)
    return sums
