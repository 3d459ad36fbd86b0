"""Back through the down projection and the gate in one kernel.

With g the gradient of a row's output, s its routing weight and down the matrix of its expert:

    grad_act_AF = g @ down (+ its adapter)    never stored
    grad_s_A    = <grad_act, act> (+ <g, down_bias>)      one partial sum per block of columns
    grad_pre_AG = gate formula backwards, for s * grad_act
    act_AF      = s * act, the right side of down's gradient

act is recomputed from the pre-activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import NO_ADAPTER, LowRows, Routing
from hf_moe_ep.ops.kernels.blocks import Blocks, dot_precision, rank_block
from hf_moe_ep.ops.kernels.gate import activate_backward, add_low_rank, halves
from hf_moe_ep.ops.kernels.sort_pairs import open_tile


@triton.jit(do_not_specialize=["num_pairs"])
def dgated_kernel(
    grad, pair_of_position, offsets, tiles, weights, down, down_bias, pre,
    grad_pre, act, partial,
    top_k, hidden, ffn, num_pairs,
    grad_stride, down_stride_l, down_stride_h, down_stride_f, bias_stride_l,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_f,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, NEED_ACT: tl.constexpr, NEED_PARTIAL: tl.constexpr,
    RANK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, start, left, column = open_tile(tiles, offsets, ffn, BLOCK_N)
    if expert < 0:
        return
    o_m = tl.arange(0, BLOCK_M)
    # What lies behind the expert's last pair reads that pair again, and is not stored.
    position = start + tl.minimum(o_m, left - 1)  # [M]
    pair = tl.load(pair_of_position + position)  # [M]
    o_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_g = grad + (pair // top_k).to(tl.int64)[:, None] * grad_stride + o_k[None, :]  # [M, K]
    down += expert.to(tl.int64) * down_stride_l
    p_w = down + o_k[:, None] * down_stride_h + o_n[None, :] * down_stride_f  # [K, N]
    grad_act = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bias_sum = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, hidden, BLOCK_K):
        if EVEN_K:
            b_g = tl.load(p_g)  # [M, K]
        else:
            b_g = tl.load(p_g, mask=(step + o_k < hidden)[None, :], other=0.0)  # [M, K]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)  # [K, N]
        else:
            m_w = (step + o_k < hidden)[:, None] & (o_n < ffn)[None, :]
            b_w = tl.load(p_w, mask=m_w, other=0.0)  # [K, N]
        grad_act = tl.dot(b_g, b_w, grad_act, input_precision=PRECISION)
        if HAS_BIAS:
            p_bias = down_bias + expert.to(tl.int64) * bias_stride_l + step + o_k
            b_bias = tl.load(p_bias, mask=step + o_k < hidden, other=0.0)  # [K]
            bias_sum += tl.sum(b_g.to(tl.float32) * b_bias.to(tl.float32)[None, :], axis=1)
        p_g += BLOCK_K
        p_w += BLOCK_K * down_stride_h
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        grad_act = add_low_rank(
            grad_act, low, position, low_b, o_n, ffn,
            low_b_stride_p, low_b_stride_f, RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
    s = tl.load(weights + pair).to(tl.float32)  # [M]
    # Row addresses start at the tile, so that what each element adds fits in 32 bits.
    pre_size = 2 * ffn if GATED else ffn
    pre += start.to(tl.int64) * pre_size
    grad_pre += start.to(tl.int64) * pre_size
    act += start.to(tl.int64) * ffn
    HALF: tl.constexpr = BLOCK_N // 2
    grad_act_halves = halves(grad_act, BLOCK_M, HALF)
    dot = tl.zeros([BLOCK_M], tl.float32)
    for half in tl.static_range(2):
        o_n = column * BLOCK_N + half * HALF + tl.arange(0, HALF)
        m_mn = (o_m < left)[:, None] & (o_n < ffn)[None, :]
        if not GATED:
            o_pre = o_m[:, None] * ffn + o_n[None, :]
            gate = tl.load(pre + o_pre, mask=m_mn, other=0.0).to(tl.float32)  # [M, N / 2]
            up = gate
        elif INTERLEAVED:
            o_both = 2 * (column * BLOCK_N + half * HALF) + tl.arange(0, 2 * HALF)
            o_pre = o_m[:, None] * pre_size + o_both[None, :]
            m_both = (o_m < left)[:, None] & (o_both < pre_size)[None, :]
            both = tl.load(pre + o_pre, mask=m_both, other=0.0).to(tl.float32)  # [M, N]
            gate, up = tl.split(tl.reshape(both, (BLOCK_M, HALF, 2)))
        else:
            o_pre = o_m[:, None] * pre_size + o_n[None, :]
            gate = tl.load(pre + o_pre, mask=m_mn, other=0.0).to(tl.float32)  # [M, N / 2]
            up = tl.load(pre + o_pre + ffn, mask=m_mn, other=0.0).to(tl.float32)  # [M, N / 2]
        b_grad_act = grad_act_halves[half]  # [M, N / 2]
        b_act, grad_gate, grad_up = activate_backward(
            b_grad_act * s[:, None], gate, up, ACTIVATION, GATED, ALPHA, LIMIT, UP_OFFSET
        )
        dot += tl.sum(b_grad_act * b_act, axis=1)
        kind = grad_pre.dtype.element_ty
        if GATED and INTERLEAVED:
            both = tl.reshape(tl.join(grad_gate, grad_up), (BLOCK_M, 2 * HALF))
            tl.store(grad_pre + o_pre, both.to(kind), mask=m_both)
        else:
            tl.store(grad_pre + o_pre, grad_gate.to(kind), mask=m_mn)
            if GATED:
                tl.store(grad_pre + o_pre + ffn, grad_up.to(kind), mask=m_mn)
        if NEED_ACT:
            p_act = act + o_m[:, None] * ffn + o_n[None, :]
            tl.store(p_act, (b_act * s[:, None]).to(act.dtype.element_ty), mask=m_mn)
    if NEED_PARTIAL:
        if HAS_BIAS:
            dot += tl.where(column == 0, bias_sum, 0.0)
        p_partial = partial + column.to(tl.int64) * num_pairs + start + o_m  # [M]
        tl.store(p_partial, dot, mask=o_m < left)


def dgated(
    grad_RH: Tensor,
    weights_RK: Tensor,
    down_LHF: Tensor,
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
    """grad_pre_AG, act_AF times the routing weight, and partial sums [columns, A] of grad_s.

    `grad_RH` has contiguous rows, `weights_RK` and `pre_AG` are contiguous. What is not needed
    is empty.
    """
    hidden, ffn = down_LHF.shape[1:]
    num_pairs = pre_AG.shape[0]
    block = blocks.dgated
    columns = triton.cdiv(ffn, block.n)
    grad_pre_AG = torch.empty_like(pre_AG)
    act_AF = pre_AG.new_empty((num_pairs, ffn) if need_act else (0,))
    partial_CA = pre_AG.new_empty(
        (columns, num_pairs) if need_weights else (0,), dtype=torch.float32
    )
    dgated_kernel[(routing.tiles.shape[0] * columns,)](
        grad_RH, routing.pair_A, routing.offsets, routing.tiles, weights_RK, down_LHF,
        down_bias_LH, pre_AG, grad_pre_AG, act_AF, partial_CA,
        weights_RK.shape[1], hidden, ffn, num_pairs,
        grad_RH.stride(0), *down_LHF.stride(),
        0 if down_bias_LH is None else down_bias_LH.stride(0), *low.kernel_arguments(),
        GATED=formula.gated, INTERLEAVED=formula.interleaved, **formula.kernel_constants(),
        HAS_BIAS=down_bias_LH is not None and need_weights, NEED_ACT=need_act,
        NEED_PARTIAL=need_weights,
        RANK=low.rank, BLOCK_P=rank_block(low.rank, blocks.rank),
        BLOCK_M=blocks.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=ffn % block.n == 0, EVEN_K=hidden % block.k == 0,
        PRECISION=dot_precision(grad_RH), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return grad_pre_AG, act_AF, partial_CA
