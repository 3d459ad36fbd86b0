"""Backpropagate through the down projection and the gate in one kernel.

For each pair, g is the gradient of the output row, s is the routing weight, and down is the matrix
of the expert:

    grad_act_AF      = g @ down (+ down's adapter)    never stored
    grad_s_A         = <grad_act, act> (+ <g, down_bias>)    one partial sum per block of columns.
                                                             bias_dots_kernel computes the last term
    grad_pre_AG      = backward of the gate formula for s * grad_act
    weighted_act_AF  = s * act, the right factor of down's gradient

act is recomputed from the pre-activations.
"""

from __future__ import annotations

import functools

import torch
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
from hf_moe_ep.ops.kernels.epilogue import activate_backward, add_low_rank, split_in_halves
from hf_moe_ep.ops.kernels.launch import Constants, cdiv, launch
from hf_moe_ep.ops.kernels.product import describe_matrix_blocks, multiply_tile
from hf_moe_ep.ops.kernels.sort_pairs import open_tile

# Number of columns that `bias_dots_kernel` reads per step.
_BIAS_COLUMNS = 64


@triton.jit
def _back_through_gate(
    grad_act, s, pre, grad_pre, weighted_act, o_m, first, num_left, ffn,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, NEED_ACT: tl.constexpr,
):  # fmt: skip
    """Store grad_pre and weighted_act from column `first` on, and return sums of grad_act * act."""
    PART: tl.constexpr = grad_act.shape[1]
    pre_size = 2 * ffn if GATED else ffn
    o_n = first + tl.arange(0, PART)
    m_mn = (o_m < num_left)[:, None] & (o_n < ffn)[None, :]
    o_pre = o_m[:, None] * pre_size + o_n[None, :]
    if GATED and INTERLEAVED:
        o_gate_up = 2 * first + tl.arange(0, 2 * PART)
        o_pre = o_m[:, None] * pre_size + o_gate_up[None, :]
        m_gate_up = (o_m < num_left)[:, None] & (o_gate_up < pre_size)[None, :]
        gate_up = tl.load(pre + o_pre, mask=m_gate_up, other=0.0).to(tl.float32)  # [M, 2 N]
        gate, up = tl.split(tl.reshape(gate_up, (grad_act.shape[0], PART, 2)))
    else:
        gate = tl.load(pre + o_pre, mask=m_mn, other=0.0).to(tl.float32)  # [M, N]
        up = gate
        if GATED:
            up = tl.load(pre + o_pre + ffn, mask=m_mn, other=0.0).to(tl.float32)  # [M, N]
    b_act, grad_gate, grad_up = activate_backward(
        grad_act * s[:, None], gate, up, ACTIVATION, GATED, ALPHA, LIMIT, UP_OFFSET
    )
    dtype = grad_pre.dtype.element_ty
    if GATED and INTERLEAVED:
        gate_up = tl.reshape(tl.join(grad_gate, grad_up), (grad_act.shape[0], 2 * PART))
        tl.store(grad_pre + o_pre, gate_up.to(dtype), mask=m_gate_up)
    else:
        tl.store(grad_pre + o_pre, grad_gate.to(dtype), mask=m_mn)
        if GATED:
            tl.store(grad_pre + o_pre + ffn, grad_up.to(dtype), mask=m_mn)
    if NEED_ACT:
        p_act = weighted_act + o_m[:, None] * ffn + o_n[None, :]
        tl.store(p_act, (b_act * s[:, None]).to(dtype), mask=m_mn)
    return tl.sum(grad_act * b_act, axis=1)


@triton.jit(do_not_specialize=["num_pairs"])
def dgated_kernel(
    grad, pair_of_position, row_of_position, offsets, tiles, weights, down, down_scale, pre,
    grad_pre, weighted_act, partial,
    hidden, ffn, num_pairs,
    grad_stride, down_stride_l, down_stride_h, down_stride_f,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_f,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    NEED_ACT: tl.constexpr, NEED_PARTIAL: tl.constexpr, MATRIX_BLOCKS: tl.constexpr,
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
    o_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND != "":
        grad_act = multiply_quantised(
            grad, row_of_position, grad_stride, down, down_scale,
            expert, position, hidden, o_n, column, ffn,
            KIND, NATIVE, BACK=True,
            BLOCK_K=BLOCK_K, EVEN_N=EVEN_N, EVEN_K=EVEN_K, PRECISION=PRECISION,
        )  # fmt: skip
    else:
        grad_act = multiply_tile(
            grad, row_of_position, grad_stride, down, down_stride_l, down_stride_h, down_stride_f,
            expert, start, position, hidden, o_n, column * BLOCK_N, ffn,
            ROWS_IN_BLOCKS=False, MATRIX_BLOCKS=MATRIX_BLOCKS,
            BLOCK_K=BLOCK_K, EVEN_N=EVEN_N, EVEN_K=EVEN_K, PRECISION=PRECISION,
        )  # fmt: skip
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        grad_act = add_low_rank(
            grad_act, low, position, low_b, o_n, ffn,
            low_b_stride_p, low_b_stride_f, RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
    s = tl.load(weights + tl.load(pair_of_position + position)).to(tl.float32)  # [M]
    # Row addresses start at the tile, so that the offset of each element fits in 32 bits.
    pre_size = 2 * ffn if GATED else ffn
    pre += start.to(tl.int64) * pre_size
    grad_pre += start.to(tl.int64) * pre_size
    weighted_act += start.to(tl.int64) * ffn
    # The gate's formula over a whole block needs more registers than a thread has. The formula is
    # computed for halves, for quarters if blocks are wide or columns are interleaved, and for
    # eighths if blocks are wide and columns are interleaved.
    HALF: tl.constexpr = BLOCK_N // 2
    QUARTER: tl.constexpr = BLOCK_N // 4
    EIGHTH: tl.constexpr = BLOCK_N // 8
    dot = tl.zeros([BLOCK_M], tl.float32)
    grad_act_halves = split_in_halves(grad_act, BLOCK_M, HALF)
    for half in tl.static_range(2):
        first = column * BLOCK_N + half * HALF
        if BLOCK_N <= 128 and not INTERLEAVED:
            dot += _back_through_gate(
                grad_act_halves[half], s, pre, grad_pre, weighted_act, o_m, first,
                num_left, ffn, GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, NEED_ACT,
            )  # fmt: skip
        else:
            quarters = split_in_halves(grad_act_halves[half], BLOCK_M, QUARTER)
            for quarter in tl.static_range(2):
                first_of_quarter = first + quarter * QUARTER
                if BLOCK_N <= 128 or not INTERLEAVED:
                    dot += _back_through_gate(
                        quarters[quarter], s, pre, grad_pre, weighted_act, o_m,
                        first_of_quarter, num_left, ffn,
                        GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, NEED_ACT,
                    )  # fmt: skip
                else:
                    eighths = split_in_halves(quarters[quarter], BLOCK_M, EIGHTH)
                    for eighth in tl.static_range(2):
                        dot += _back_through_gate(
                            eighths[eighth], s, pre, grad_pre, weighted_act, o_m,
                            first_of_quarter + eighth * EIGHTH, num_left, ffn,
                            GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, NEED_ACT,
                        )  # fmt: skip
    if NEED_PARTIAL:
        p_partial = partial + column.to(tl.int64) * num_pairs + start + o_m  # [M]
        tl.store(p_partial, dot, mask=o_m < num_left)


@triton.jit(do_not_specialize=["num_column_blocks", "num_pairs"])
def bias_dots_kernel(
    grad, row_of_position, offsets, tiles, bias, partial,
    num_column_blocks, hidden, num_pairs, grad_stride, bias_stride_l,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store <gradient of a's row, bias of a's expert> for each pair a, after the partial sums."""
    expert, start, num_left, _ = open_tile(tiles, offsets, 1, 1)
    if expert < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    row = tl.load(row_of_position + start + tl.minimum(o_m, num_left - 1))  # [M]
    p_g = grad + row.to(tl.int64)[:, None] * grad_stride
    bias += expert.to(tl.int64) * bias_stride_l
    total = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, hidden, BLOCK_K):
        o_k = step + tl.arange(0, BLOCK_K)
        b_bias = tl.load(bias + o_k, mask=o_k < hidden, other=0.0)  # [K]
        b_g = tl.load(p_g + o_k[None, :], mask=(o_k < hidden)[None, :], other=0.0)  # [M, K]
        total += tl.sum(b_g.to(tl.float32) * b_bias.to(tl.float32)[None, :], axis=1)
    p_partial = partial + num_pairs.to(tl.int64) * num_column_blocks + start + o_m  # [M]
    tl.store(p_partial, total, mask=o_m < num_left)


def dgated(
    grad_RH: Tensor,
    weights_RK: Tensor,
    down_LHF: Matrices,
    down_bias_LH: Tensor | None,
    pre_AG: Tensor,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
    *,
    need_act: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return grad_pre_AG, weighted_act_AF and partial sums of grad_s.

    The partial sums are [blocks of columns, A]. If there is a bias, a last row has its term. An
    output that is not needed is empty. `weights_RK`, `pre_AG` and each row of `grad_RH` must be
    contiguous.
    """
    hidden, ffn = down_LHF.shape[1:]
    num_pairs = pre_AG.shape[0]
    block = blocks.dgated
    num_column_blocks = cdiv(ffn, block.n)
    grad_pre_AG = torch.empty_like(pre_AG)
    weighted_act_AF = pre_AG.new_empty((num_pairs, ffn) if need_act else (0,))
    has_bias = down_bias_LH is not None and need_weights
    partial_CA = pre_AG.new_empty(
        (num_column_blocks + has_bias, num_pairs) if need_weights else (0,), dtype=torch.float32
    )
    values, scales, *strides = list_matrix_arguments(down_LHF)
    matrix, block_name = None, ""
    if scales is None:
        matrix, block_name = describe_matrix_blocks(values, block, block.n)
    constants = _list_constants(
        formula, block, blocks.m, low.rank, blocks.rank, block_name,
        *list_matrix_constants(down_LHF), need_act, need_weights,
        ffn % block.n == 0, hidden % block.k == 0, get_dot_precision(grad_RH),
    )  # fmt: skip
    launch(
        dgated_kernel, (routing.tiles.shape[0] * num_column_blocks,), constants,
        grad_RH, routing.pair_A, routing.row_A, routing.offsets, routing.tiles, weights_RK,
        matrix or values, scales, pre_AG, grad_pre_AG, weighted_act_AF, partial_CA,
        hidden, ffn, num_pairs, grad_RH.stride(0), *strides, *low.list_kernel_arguments(),
    )  # fmt: skip
    if has_bias:
        assert down_bias_LH is not None
        launch(
            bias_dots_kernel, (routing.tiles.shape[0],), _list_bias_constants(blocks.m),
            grad_RH, routing.row_A, routing.offsets, routing.tiles, down_bias_LH,
            partial_CA, num_column_blocks, hidden, num_pairs,
            grad_RH.stride(0), down_bias_LH.stride(0),
        )  # fmt: skip
    return grad_pre_AG, weighted_act_AF, partial_CA


@functools.cache
def _list_constants(
    formula: ExpertFormula, block: Block, block_m: int, rank: int, most_rank: int, block_name: str,
    kind: str, native: bool, need_act: bool, need_weights: bool,
    even_n: bool, even_k: bool, precision: str,
) -> Constants:  # fmt: skip
    return Constants(
        GATED=formula.gated, INTERLEAVED=formula.interleaved, **formula.list_kernel_constants(),
        NEED_ACT=need_act, NEED_PARTIAL=need_weights, MATRIX_BLOCKS=block_name,
        KIND=kind, NATIVE=native, RANK=rank, BLOCK_P=fit_rank(rank, most_rank),
        BLOCK_M=block_m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=even_n, EVEN_K=even_k, PRECISION=precision, **choose_compiler_options(block),
    )  # fmt: skip


@functools.cache
def _list_bias_constants(block_m: int) -> Constants:
    return Constants(BLOCK_M=block_m, BLOCK_K=_BIAS_COLUMNS)
