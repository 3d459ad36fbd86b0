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
    num_n = tl.cdiv(ffn, BLOCK_N)
    tile, column = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    expert = tl.load(tiles + 2 * tile)
    if expert < 0:
        return
    start = tl.load(tiles + 2 * tile + 1)
    m = tl.arange(0, BLOCK_M)
    left = tl.load(offsets + expert + 1) - start
    row = tl.load(pair_of_position + start + tl.minimum(m, left - 1)) // top_k
    # Interleaved, one block holds gate and up of BLOCK_N columns: the weight rows lie together.
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    first = column * WIDTH
    n = first + tl.arange(0, WIDTH)
    limit_n = 2 * ffn if INTERLEAVED else ffn
    k = tl.arange(0, BLOCK_K)
    x_ptrs = rows + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    weight += expert.to(tl.int64) * weight_stride_l
    w_ptrs = weight + n[None, :] * weight_stride_g + k[:, None] * weight_stride_h
    up_half = ffn * weight_stride_g
    gate = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    up = gate
    for step in range(0, hidden, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(step + k < hidden)[None, :], other=0.0)
        inside = (n < limit_n)[None, :]
        if not EVEN_K:
            inside = inside & (step + k < hidden)[:, None]
        w = tl.load(w_ptrs) if EVEN_N and EVEN_K else tl.load(w_ptrs, mask=inside, other=0.0)
        gate = tl.dot(x, w, gate, input_precision=PRECISION)
        if GATED and not INTERLEAVED:
            u_ptrs = w_ptrs + up_half
            w = tl.load(u_ptrs) if EVEN_N and EVEN_K else tl.load(u_ptrs, mask=inside, other=0.0)
            up = tl.dot(x, w, up, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * weight_stride_h
    if RANK:
        position = start + tl.minimum(m, left - 1)
        low_b += expert.to(tl.int64) * low_b_stride_l
        gate = add_low_rank(
            gate, low, position, low_b, n, limit_n, low_b_stride_p, low_b_stride_g,
            RANK, BLOCK_P, PRECISION,
        )  # fmt: skip
        if GATED and not INTERLEAVED:
            low_b += ffn * low_b_stride_g
            up = add_low_rank(
                up, low, position, low_b, n, limit_n, low_b_stride_p, low_b_stride_g,
                RANK, BLOCK_P, PRECISION,
            )  # fmt: skip
    if HAS_BIAS:
        b_ptrs = bias + expert.to(tl.int64) * bias_stride_l + n
        gate += tl.load(b_ptrs, mask=n < limit_n, other=0.0).to(tl.float32)[None, :]
        if GATED and not INTERLEAVED:
            up += tl.load(b_ptrs + ffn, mask=n < limit_n, other=0.0).to(tl.float32)[None, :]
    # Row addresses start at the tile, so that what each element adds fits in 32 bits.
    pre_size = 2 * ffn if GATED else ffn
    pre += start.to(tl.int64) * pre_size
    act += start.to(tl.int64) * ffn
    HALF: tl.constexpr = BLOCK_N // 2
    gate_halves = halves(gate, BLOCK_M, WIDTH // 2)
    up_halves = halves(up, BLOCK_M, WIDTH // 2)
    for half in tl.static_range(2):
        g = gate_halves[half]
        u = up_halves[half]
        if KEEP_PRE:
            n = first + half * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
            where = m[:, None] * pre_size + n[None, :]
            stored = (m < left)[:, None] & (n < limit_n)[None, :]
            tl.store(pre + where, g.to(pre.dtype.element_ty), mask=stored)
            if GATED and not INTERLEAVED:
                tl.store(pre + where + ffn, u.to(pre.dtype.element_ty), mask=stored)
        if INTERLEAVED:
            g, u = tl.split(tl.reshape(g, (BLOCK_M, HALF, 2)))
        out = activate(g, u, ACTIVATION, GATED, ALPHA, LIMIT, UP_OFFSET)
        n = column * BLOCK_N + half * HALF + tl.arange(0, HALF)
        stored = (m < left)[:, None] & (n < ffn)[None, :]
        tl.store(act + m[:, None] * ffn + n[None, :], out.to(act.dtype.element_ty), mask=stored)


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
    num_pairs, (hidden, pre_size) = routing.pair_A.numel(), (rows_RH.shape[1], weight_LGH.shape[1])
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
