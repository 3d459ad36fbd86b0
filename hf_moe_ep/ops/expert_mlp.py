"""down(silu(gate(x)) * up(x)) for every (row, expert) pair, weighted and summed per row.

Rows are sorted by expert once, so each expert is one matrix product over consecutive rows. With
two experts, top-2 and row 1 going to expert 0 only (L = 2 means "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   ->   pairs by expert: 0: rows 0, 1    1: row 0

Saved for backward: the rows, the gate/up pre-activations of each pair and the routing. The
activation is recomputed, and the routing weights' gradient needs no expert output: with
`out += down @ (w a)` it is `<grad, down @ a> = <down^T grad, a>`, whose left factor the backward
computes anyway (SonicMoE, arXiv 2512.14080, section 4).

`grad_scale` multiplies the gradients of the weights, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_moe_ep.ops.permute import add_rows, invert


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: Tensor,
        weights_RK: Tensor,
        gate_up_LGH: Tensor,
        down_LHF: Tensor,
        expert_ids_RK: Tensor,
        counts_L: list[int],
        grad_scale: float,
    ) -> Tensor:
        pair_A = expert_ids_RK.flatten().argsort(stable=True)[: sum(counts_L)]
        row_of_pair_A = pair_A // expert_ids_RK.shape[1]
        num_rows, top_k = expert_ids_RK.shape
        slots_RK = invert(row_of_pair_A, pair_A % top_k, (num_rows, top_k))
        x_AH = rows_RH.index_select(0, row_of_pair_A)
        gate_up_AG = _per_expert(x_AH, gate_up_LGH.transpose(1, 2), counts_L)
        act_AF = _scale(_swiglu(gate_up_AG)[1], weights_RK.flatten()[pair_A])
        y_AH = _per_expert(act_AF, down_LHF.transpose(1, 2), counts_L)
        ctx.save_for_backward(
            rows_RH, weights_RK, gate_up_LGH, down_LHF, gate_up_AG, pair_A, slots_RK
        )
        ctx.counts_L, ctx.grad_scale = counts_L, grad_scale
        return add_rows(y_AH, row_of_pair_A, slots_RK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        rows_RH, weights_RK, gate_up_LGH, down_LHF, gate_up_AG, pair_A, slots_RK = ctx.saved_tensors
        counts_L, scale = ctx.counts_L, ctx.grad_scale
        row_of_pair_A = pair_A // weights_RK.shape[1]
        weight_A = weights_RK.flatten()[pair_A]
        grad_AH = grad_RH.index_select(0, row_of_pair_A)
        silu_AF, act_AF = _swiglu(gate_up_AG)
        grad_act_AF = _per_expert(grad_AH, down_LHF, counts_L)
        grad_weights_RK = grad_gate_up = grad_down = None
        if ctx.needs_input_grad[1]:
            grad_A = torch.linalg.vecdot(grad_act_AF.to(weights_RK.dtype), act_AF.to(weights_RK))
            grad_weights_RK = weights_RK.new_zeros(weights_RK.numel())
            grad_weights_RK = grad_weights_RK.index_put((pair_A,), grad_A).view_as(weights_RK)
        if ctx.needs_input_grad[3]:
            grad_down = _outer(grad_AH, _scale(act_AF, weight_A), counts_L, scale)
        grad_gate_up_AG = _swiglu_backward(gate_up_AG, silu_AF, _scale(grad_act_AF, weight_A))
        if ctx.needs_input_grad[2]:
            x_AH = rows_RH.index_select(0, row_of_pair_A)
            grad_gate_up = _outer(grad_gate_up_AG, x_AH, counts_L, scale)
        grad_rows_RH = None
        if ctx.needs_input_grad[0]:
            grad_x_AH = _per_expert(grad_gate_up_AG, gate_up_LGH, counts_L)
            grad_rows_RH = add_rows(grad_x_AH, row_of_pair_A, slots_RK)
        return grad_rows_RH, grad_weights_RK, grad_gate_up, grad_down, None, None, None


def expert_mlp(
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    gate_up_LGH: Tensor,
    down_LHF: Tensor,
    *,
    counts_L: list[int],
    grad_scale: float,
) -> Tensor:
    """out_RH: the weighted sum of the experts of each row; zero for a row without experts.

    `expert_ids_RK` holds 0..L-1, or L for "no expert here", and a row names an expert at most
    once; `counts_L` counts the pairs per expert (on the host); gate_up_LGH stacks gate over up,
    so G = 2 F.
    """
    return _ExpertMLP.apply(
        rows_RH, weights_RK, gate_up_LGH, down_LHF, expert_ids_RK, counts_L, grad_scale
    )


def _segments(counts_L: list[int]) -> list[tuple[int, slice]]:
    segments, start = [], 0
    for expert, count in enumerate(counts_L):
        if count:
            segments.append((expert, slice(start, start + count)))
        start += count
    return segments


def _per_expert(rows_AI: Tensor, weights_LIO: Tensor, counts_L: list[int]) -> Tensor:
    """Each pair's row times the matrix of its expert."""
    out_AO = rows_AI.new_empty(rows_AI.shape[0], weights_LIO.shape[2])
    for expert, pairs in _segments(counts_L):
        torch.mm(rows_AI[pairs], weights_LIO[expert], out=out_AO[pairs])
    return out_AO


def _outer(left_AO: Tensor, right_AI: Tensor, counts_L: list[int], scale: float) -> Tensor:
    """[L, O, I]: `scale * left^T right` over the pairs of each expert; zero without pairs."""
    shape = (len(counts_L), left_AO.shape[1], right_AI.shape[1])
    out_LOI = left_AO.new_empty(shape)
    for expert, count in enumerate(counts_L):
        if not count:
            out_LOI[expert].zero_()
    for expert, pairs in _segments(counts_L):
        out = out_LOI[expert]
        torch.addmm(out, left_AO[pairs].t(), right_AI[pairs], beta=0, alpha=scale, out=out)
    return out_LOI


def _scale(act_AF: Tensor, weight_A: Tensor) -> Tensor:
    # On the narrow side of the down projection; formed in the weights' fp32 and rounded once.
    return (act_AF * weight_A.unsqueeze(1)).to(act_AF.dtype)


def _swiglu(gate_up_AG: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate), and the activation silu(gate) * up."""
    gate_AF, up_AF = gate_up_AG.chunk(2, dim=1)
    silu_AF = functional.silu(gate_AF)
    return silu_AF, silu_AF * up_AF


def _swiglu_backward(gate_up_AG: Tensor, silu_AF: Tensor, grad_act_AF: Tensor) -> Tensor:
    gate_AF, up_AF = gate_up_AG.chunk(2, dim=1)
    grad_gate_up_AG = torch.empty_like(gate_up_AG)
    grad_gate_AF, grad_up_AF = grad_gate_up_AG.chunk(2, dim=1)
    torch.mul(grad_act_AF, silu_AF, out=grad_up_AF)
    grad_gate_AF.copy_(torch.ops.aten.silu_backward(grad_act_AF * up_AF, gate_AF))
    return grad_gate_up_AG
