"""Gather rows, multiply them by their expert's gate and up matrices, and gate them, in one kernel.

    pre_AG[a] = up_weight[expert of a] @ rows[row of a] (+ bias)         stored if `keep_pre`
    act_AF[a] = gate formula of pre_AG[a], computed from the fp32 sums

The second product of an adapter adds a few steps to the same sum. `LowRows` holds the result of the
first product. Gate and up are one product, twice as wide as act. If gate and up are concatenated in
the weight, a block has the same columns of the gate half and of the up half. If gate and up are
interleaved, a block has pairs of neighbouring columns, which are split after the sum.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import NO_ADAPTER, LowRows, Routing
from hf_moe_ep.ops.kernels.blocks import (
    Block,
    Blocks,
    choose_compiler_options,
    fit_rank,
    get_dot_precision,
)
from hf_moe_ep.ops.kernels.dequantise import (
    Matrices,
    list_matrix_arguments,
    list_matrix_constants,
    multiply_quantised,
)
from hf_moe_ep.ops.kernels.epilogue import activate, add_low_rank, split_in_halves
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch
from hf_moe_ep.ops.kernels.product import describe_matrix_blocks, multiply_tile
from hf_moe_ep.ops.kernels.sort_pairs import open_tile


@triton.jit
def up_kernel(
    rows, row_of_position, offsets, tiles, weight, weight_scale, bias, pre, act,
    hidden, ffn,
    row_stride, weight_stride_l, weight_stride_g, weight_stride_h, bias_stride_l,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_g,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, KEEP_PRE: tl.constexpr, MATRIX_BLOCKS: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr,
    RANK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, start, num_left, column = open_tile(tiles, offsets, ffn, BLOCK_N)
    if expert < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    # Rows after the expert's last pair repeat that pair, and their results are not stored.
    position = start + tl.minimum(o_m, num_left - 1)  # [M]
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    HALF: tl.constexpr = WIDTH // 2
    pre_size = 2 * ffn if GATED else ffn
    o_w = tl.arange(0, WIDTH)
    if GATED and not INTERLEAVED:
        # In the last block, columns beyond ffn read other columns or zeros. Their results are not
        # stored.
        o_g = column * BLOCK_N + o_w % BLOCK_N + (o_w // BLOCK_N) * ffn
    else:
        o_g = column * WIDTH + o_w
    if KIND != "":
        sums = multiply_quantised(
            rows, row_of_position, row_stride, weight, weight_scale,
            expert, position, hidden, o_g, column, pre_size,
            KIND, NATIVE, BACK=False,
            BLOCK_K=BLOCK_K, EVEN_N=EVEN_N, EVEN_K=EVEN_K, PRECISION=PRECISION,
        )  # fmt: skip
    else:
        sums = multiply_tile(
            rows, row_of_position, row_stride, weight,
            weight_stride_l, weight_stride_h, weight_stride_g,
            expert, start, position, hidden, o_g,
            column * (BLOCK_N if MATRIX_BLOCKS == "halves" else WIDTH), pre_size,
            ROWS_IN_BLOCKS=False, MATRIX_BLOCKS=MATRIX_BLOCKS,
            BLOCK_K=BLOCK_K, EVEN_N=EVEN_N, EVEN_K=EVEN_K, PRECISION=PRECISION,
        )  # fmt: skip
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        sums = add_low_rank(
            sums, low, position, low_b, o_g, pre_size, low_b_stride_p, low_b_stride_g,
            RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
    if HAS_BIAS:
        p_bias = bias + expert.to(tl.int64) * bias_stride_l + o_g  # [WIDTH]
        b_bias = tl.load(p_bias, mask=o_g < pre_size, other=0.0)  # [WIDTH]
        sums += b_bias.to(tl.float32)[None, :]
    # Row addresses start at the tile, so that the offset of each element fits in 32 bits.
    pre += start.to(tl.int64) * pre_size
    act += start.to(tl.int64) * ffn
    first, second = split_in_halves(sums, BLOCK_M, HALF)
    if GATED and not INTERLEAVED:
        gates = split_in_halves(first, BLOCK_M, HALF // 2)
        ups = split_in_halves(second, BLOCK_M, HALF // 2)
    else:
        gates = (first, second)
        ups = gates
    for half in tl.static_range(2):
        g = gates[half]  # [M, N / 2], or [M, N] with gate and up interleaved
        u = ups[half]
        o_n = column * BLOCK_N + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        m_mn = (o_m < num_left)[:, None] & (o_n < ffn)[None, :]
        if INTERLEAVED:
            o_gate_up = column * WIDTH + half * HALF + tl.arange(0, HALF)
            if KEEP_PRE:
                p_pre = pre + o_m[:, None] * pre_size + o_gate_up[None, :]  # [M, N]
                m_gate_up = (o_m < num_left)[:, None] & (o_gate_up < pre_size)[None, :]
                tl.store(p_pre, g.to(pre.dtype.element_ty), mask=m_gate_up)
            g, u = tl.split(tl.reshape(g, (BLOCK_M, HALF // 2, 2)))
        elif KEEP_PRE:
            p_pre = pre + o_m[:, None] * pre_size + o_n[None, :]  # [M, N / 2]
            tl.store(p_pre, g.to(pre.dtype.element_ty), mask=m_mn)
            if GATED:
                tl.store(p_pre + ffn, u.to(pre.dtype.element_ty), mask=m_mn)
        b_act = activate(g, u, ACTIVATION, GATED, ALPHA, LIMIT, UP_OFFSET)  # [M, N / 2]
        p_act = act + o_m[:, None] * ffn + o_n[None, :]
        tl.store(p_act, b_act.to(act.dtype.element_ty), mask=m_mn)


def up(
    rows_RH: Tensor,
    weight_LGH: Matrices,
    bias_LG: Tensor | None,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
    *,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """Return act_AF and pre_AG (empty unless `keep_pre`). Rows of `rows_RH` must be contiguous."""
    num_pairs = routing.pair_A.numel()
    pre_size, hidden = weight_LGH.shape[1:]
    ffn = formula.ffn_size(pre_size)
    act_AF = rows_RH.new_empty(num_pairs, ffn)
    pre_AG = rows_RH.new_empty((num_pairs, pre_size) if keep_pre else (0,))
    block: Block = (low.rank and blocks.up_adapted) or blocks.up
    values, scales, *strides = list_matrix_arguments(weight_LGH)
    matrix, block_name = None, ""
    if scales is None:
        width = 2 * block.n if formula.gated else block.n
        in_halves = formula.gated and not formula.interleaved
        matrix, block_name = describe_matrix_blocks(values.mT, block, width, in_halves=in_halves)
    grid = (routing.tiles.shape[0] * cdiv(ffn, block.n),)
    constants = _list_constants(
        formula, block, blocks.m, low.rank, blocks.rank, block_name,
        *list_matrix_constants(weight_LGH), bias_LG is not None, keep_pre,
        ffn % block.n == 0, hidden % block.k == 0, get_dot_precision(rows_RH),
    )  # fmt: skip
    launch(
        up_kernel, grid, constants,
        rows_RH, routing.row_A, routing.offsets, routing.tiles, matrix or values, scales, bias_LG,
        pre_AG, act_AF, hidden, ffn,
        rows_RH.stride(0), *strides, 0 if bias_LG is None else bias_LG.stride(0),
        *low.list_kernel_arguments(),
    )  # fmt: skip
    return act_AF, pre_AG


@functools.cache
def _list_constants(
    formula: ExpertFormula, block: Block, block_m: int, rank: int, most_rank: int, block_name: str,
    kind: str, native: bool, has_bias: bool, keep_pre: bool,
    even_n: bool, even_k: bool, precision: str,
) -> Constants:  # fmt: skip
    return Constants(
        GATED=formula.gated, INTERLEAVED=formula.interleaved, **formula.list_kernel_constants(),
        HAS_BIAS=has_bias, KEEP_PRE=keep_pre, MATRIX_BLOCKS=block_name, KIND=kind, NATIVE=native,
        RANK=rank, BLOCK_P=fit_rank(rank, most_rank),
        BLOCK_M=block_m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=even_n, EVEN_K=even_k, PRECISION=precision, **choose_compiler_options(block),
    )  # fmt: skip
