"""Gather rows, multiply by the gate and up matrices of their expert, apply the gate: one kernel.

    pre_AG[a] = up_weight[expert of a] @ rows[row of a] (+ bias)         kept on demand
    act_AF[a] = gate formula of pre_AG[a], from the fp32 sums

An adapter is a few more steps of the same sum: its first product comes with the call (`LowRows`).
Concatenated weights are read as two halves of the one tensor into two accumulators; interleaved
ones in one block whose even and odd columns are taken apart after the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import NO_ADAPTER, LowRows, Routing
from hf_moe_ep.ops.kernels.blocks import Block, Blocks, dot_precision, rank_block
from hf_moe_ep.ops.kernels.gate import activate, add_low_rank, halves
from hf_moe_ep.ops.kernels.sort_pairs import open_tile


@triton.jit
def up_kernel(
    rows, pair_of_position, offsets, tiles, weight, bias, pre, act,
    top_k, hidden, ffn,
    row_stride, weight_stride_l, weight_stride_g, weight_stride_h, bias_stride_l,
    low, low_b, low_b_stride_l, low_b_stride_p, low_b_stride_g,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, KEEP_PRE: tl.constexpr,
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
    row = tl.load(pair_of_position + position) // top_k  # [M]
    # Interleaved, one block holds gate and up of BLOCK_N columns: the weight rows lie together.
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    first = column * WIDTH
    o_n = first + tl.arange(0, WIDTH)
    limit_n = 2 * ffn if INTERLEAVED else ffn
    o_k = tl.arange(0, BLOCK_K)
    p_x = rows + row.to(tl.int64)[:, None] * row_stride + o_k[None, :]  # [M, K]
    weight += expert.to(tl.int64) * weight_stride_l
    p_w = weight + o_n[None, :] * weight_stride_g + o_k[:, None] * weight_stride_h  # [K, WIDTH]
    up_half = ffn * weight_stride_g
    gate = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    up = gate
    for step in range(0, hidden, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x)  # [M, K]
        else:
            b_x = tl.load(p_x, mask=(step + o_k < hidden)[None, :], other=0.0)  # [M, K]
        m_w = (o_n < limit_n)[None, :]  # [1 or K, WIDTH]
        if not EVEN_K:
            m_w = m_w & (step + o_k < hidden)[:, None]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)  # [K, WIDTH]
        else:
            b_w = tl.load(p_w, mask=m_w, other=0.0)  # [K, WIDTH]
        gate = tl.dot(b_x, b_w, gate, input_precision=PRECISION)
        if GATED and not INTERLEAVED:
            p_u = p_w + up_half
            if EVEN_N and EVEN_K:
                b_u = tl.load(p_u)  # [K, N]
            else:
                b_u = tl.load(p_u, mask=m_w, other=0.0)  # [K, N]
            up = tl.dot(b_x, b_u, up, input_precision=PRECISION)
        p_x += BLOCK_K
        p_w += BLOCK_K * weight_stride_h
    if RANK:
        low_b += expert.to(tl.int64) * low_b_stride_l
        gate = add_low_rank(
            gate, low, position, low_b, o_n, limit_n, low_b_stride_p, low_b_stride_g,
            RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
        if GATED and not INTERLEAVED:
            low_b += ffn * low_b_stride_g
            up = add_low_rank(
                up, low, position, low_b, o_n, limit_n, low_b_stride_p, low_b_stride_g,
                RANK, BLOCK_P, PRECISION,
            )  # fmt: skip
    if HAS_BIAS:
        p_bias = bias + expert.to(tl.int64) * bias_stride_l + o_n  # [WIDTH]
        b_bias = tl.load(p_bias, mask=o_n < limit_n, other=0.0)  # [WIDTH]
        gate += b_bias.to(tl.float32)[None, :]
        if GATED and not INTERLEAVED:
            b_bias = tl.load(p_bias + ffn, mask=o_n < limit_n, other=0.0)  # [N]
            up += b_bias.to(tl.float32)[None, :]
    # Row addresses start at the tile, so that what each element adds fits in 32 bits.
    pre_size = 2 * ffn if GATED else ffn
    pre += start.to(tl.int64) * pre_size
    act += start.to(tl.int64) * ffn
    HALF: tl.constexpr = BLOCK_N // 2
    gate_halves = halves(gate, BLOCK_M, WIDTH // 2)
    up_halves = halves(up, BLOCK_M, WIDTH // 2)
    for half in tl.static_range(2):
        g = gate_halves[half]  # [M, WIDTH / 2]
        u = up_halves[half]
        if KEEP_PRE:
            o_n = first + half * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
            p_pre = pre + o_m[:, None] * pre_size + o_n[None, :]  # [M, WIDTH / 2]
            m_pre = (o_m < left)[:, None] & (o_n < limit_n)[None, :]
            tl.store(p_pre, g.to(pre.dtype.element_ty), mask=m_pre)
            if GATED and not INTERLEAVED:
                tl.store(p_pre + ffn, u.to(pre.dtype.element_ty), mask=m_pre)
        if INTERLEAVED:
            g, u = tl.split(tl.reshape(g, (BLOCK_M, HALF, 2)))
        b_act = activate(g, u, ACTIVATION, GATED, ALPHA, LIMIT, UP_OFFSET)  # [M, N / 2]
        o_n = column * BLOCK_N + half * HALF + tl.arange(0, HALF)
        p_act = act + o_m[:, None] * ffn + o_n[None, :]
        m_act = (o_m < left)[:, None] & (o_n < ffn)[None, :]
        tl.store(p_act, b_act.to(act.dtype.element_ty), mask=m_act)


def up(
    rows_RH: Tensor,
    top_k: int,
    weight_LGH: Tensor,
    bias_LG: Tensor | None,
    routing: Routing,
    formula: ExpertFormula,
    blocks: Blocks,
    low: LowRows = NO_ADAPTER,
    *,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """act_AF and pre_AG; the latter is empty unless kept. `rows_RH` has contiguous rows."""
    num_pairs = routing.pair_A.numel()
    pre_size, hidden = weight_LGH.shape[1:]
    ffn = formula.ffn_size(pre_size)
    act_AF = rows_RH.new_empty(num_pairs, ffn)
    pre_AG = rows_RH.new_empty((num_pairs, pre_size) if keep_pre else (0,))
    block: Block = (low.rank and blocks.up_adapted) or blocks.up
    grid = (routing.tiles.shape[0] * triton.cdiv(ffn, block.n),)
    up_kernel[grid](
        rows_RH, routing.pair_A, routing.offsets, routing.tiles, weight_LGH, bias_LG, pre_AG,
        act_AF, top_k, hidden, ffn,
        rows_RH.stride(0), *weight_LGH.stride(), 0 if bias_LG is None else bias_LG.stride(0),
        *low.kernel_arguments(),
        GATED=formula.gated, INTERLEAVED=formula.interleaved, **formula.kernel_constants(),
        HAS_BIAS=bias_LG is not None, KEEP_PRE=keep_pre,
        RANK=low.rank, BLOCK_P=rank_block(low.rank, blocks.rank),
        BLOCK_M=blocks.m, BLOCK_N=block.n, BLOCK_K=block.k,
        EVEN_N=ffn % block.n == 0, EVEN_K=hidden % block.k == 0,
        PRECISION=dot_precision(rows_RH), num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return act_AF, pre_AG
