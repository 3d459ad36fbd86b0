"""The expert MLP in plain torch: one matrix product per expert over consecutive pairs.

The path of CPUs, of fp64 and of all that the Triton kernels do not cover. Routing weights are
applied on the narrow side of the down projection (F columns instead of H) and rounded once. The
number of pairs per expert has to be known on the host; unless the dispatch already brought it,
reading it is this path's one host sync.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hf_moe_ep.ops.layout import ExpertsLayout, activate, activate_backward
from hf_moe_ep.ops.permute import add_rows, count_pairs, invert
from hf_moe_ep.ops.weights import ExpertWeights, Routing, WeightGrads


def route(expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights) -> Routing:
    """Pairs sorted by expert, those without an expert here left out."""
    if counts_L is None:
        counts_L = count_pairs(expert_ids_RK, experts.up.shape[0]).tolist()
    num_rows, top_k = expert_ids_RK.shape
    order = expert_ids_RK.flatten().argsort(stable=True)[: sum(counts_L)]
    pair_A = order.to(torch.int32)
    slots_RK = invert(order // top_k, order % top_k, (num_rows, top_k)).to(torch.int32)
    offsets = torch.tensor([0, *counts_L], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Routing(pair_A, slots_RK, offsets, tiles=offsets.new_empty(0))


def routing_shapes(num_pairs: int, up_LGH: Tensor) -> tuple[tuple[int, ...], ...]:
    """Shapes of pair_A, offsets and tiles, for torch.compile."""
    return (num_pairs,), (up_LGH.shape[0] + 1,), (0,)


def forward(
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    layout: ExpertsLayout,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out_RH, and the pre-activations pre_AG whether they are to be kept or not."""
    segments = _segments(routing)
    row_of_pair_A = routing.pair_A // weights_RK.shape[1]
    pre_AG = _pre_activations(rows_RH, row_of_pair_A, experts, segments)
    weight_A = weights_RK.flatten().index_select(0, routing.pair_A)
    act_AF = _scale(activate(pre_AG, layout), weight_A)
    y_AH = _per_expert(act_AF, experts.down.transpose(1, 2), None, segments)
    if experts.down_bias is not None:
        for expert, pairs in segments:
            y_AH[pairs].addcmul_(weight_A[pairs, None].to(y_AH), experts.down_bias[expert])
    return add_rows(y_AH, row_of_pair_A, routing.slots_RK), pre_AG


def backward(
    grad_RH: Tensor,
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    pre_AG: Tensor | None,
    layout: ExpertsLayout,
    *,
    grad_scale: float,
    needs: list[bool],
) -> WeightGrads:
    """Gradients of rows, weights, up, up_bias, down, down_bias; None where not in `needs`.

    `pre_AG` None computes the pre-activations again.
    """
    need_rows, need_weights, need_up, need_up_bias, need_down, need_down_bias = needs
    segments = _segments(routing)
    pair_A = routing.pair_A
    row_of_pair_A = pair_A // weights_RK.shape[1]
    weight_A = weights_RK.flatten().index_select(0, pair_A)
    if pre_AG is None:
        pre_AG = _pre_activations(rows_RH, row_of_pair_A, experts, segments)
    grad_AH = grad_RH.index_select(0, row_of_pair_A)
    grad_act_AF = _per_expert(grad_AH, experts.down, None, segments)
    act_AF, grad_pre_AG = activate_backward(pre_AG, _scale(grad_act_AF, weight_A), layout)
    grads = WeightGrads()
    if need_weights:
        wide = weights_RK.dtype
        grad_A = torch.linalg.vecdot(grad_act_AF.to(wide), act_AF.to(wide))
        if experts.down_bias is not None:
            for expert, pairs in segments:
                grad_A[pairs] += grad_AH[pairs].to(wide) @ experts.down_bias[expert].to(wide)
        grad_weights = weights_RK.new_zeros(weights_RK.numel())
        grads.weights = grad_weights.index_copy_(0, pair_A.long(), grad_A).view_as(weights_RK)
    if need_rows:
        grad_x_AH = _per_expert(grad_pre_AG, experts.up, None, segments)
        grads.rows = add_rows(grad_x_AH, row_of_pair_A, routing.slots_RK)
    if need_down:
        act_AF = _scale(act_AF, weight_A)
        grads.down = _outer(grad_AH, act_AF, experts.down, segments, grad_scale)
    if need_down_bias:
        assert experts.down_bias is not None
        scaled_AH = _scale(grad_AH, weight_A)
        grads.down_bias = _sum(scaled_AH, experts.down_bias, segments, grad_scale)
    if need_up:
        x_AH = rows_RH.index_select(0, row_of_pair_A)
        grads.up = _outer(grad_pre_AG, x_AH, experts.up, segments, grad_scale)
    if need_up_bias:
        assert experts.up_bias is not None
        grads.up_bias = _sum(grad_pre_AG, experts.up_bias, segments, grad_scale)
    return grads


def _segments(routing: Routing) -> list[tuple[int, slice]]:
    """(expert, its pairs) of every expert that has any."""
    ends = routing.offsets.tolist()
    return [
        (expert, slice(start, end))
        for expert, (start, end) in enumerate(itertools.pairwise(ends))
        if end > start
    ]


def _pre_activations(
    rows_RH: Tensor,
    row_of_pair_A: Tensor,
    experts: ExpertWeights,
    segments: list[tuple[int, slice]],
) -> Tensor:
    x_AH = rows_RH.index_select(0, row_of_pair_A)
    return _per_expert(x_AH, experts.up.transpose(1, 2), experts.up_bias, segments)


def _per_expert(
    rows_AI: Tensor,
    matrix_LIO: Tensor,
    bias_LO: Tensor | None,
    segments: list[tuple[int, slice]],
) -> Tensor:
    """Each pair's row times the matrix of its expert."""
    out_AO = rows_AI.new_empty(rows_AI.shape[0], matrix_LIO.shape[2])
    for expert, pairs in segments:
        if bias_LO is None:
            torch.mm(rows_AI[pairs], matrix_LIO[expert], out=out_AO[pairs])
        else:
            out = out_AO[pairs]
            torch.addmm(bias_LO[expert], rows_AI[pairs], matrix_LIO[expert], out=out)
    return out_AO


def _outer(
    left_AO: Tensor,
    right_AI: Tensor,
    like_LOI: Tensor,
    segments: list[tuple[int, slice]],
    scale: float,
) -> Tensor:
    """`scale * left^T right` over the pairs of each expert, laid out as `like_LOI`."""
    out_LOI = torch.empty_like(like_LOI)
    for expert in set(range(out_LOI.shape[0])) - {expert for expert, _ in segments}:
        out_LOI[expert].zero_()
    for expert, pairs in segments:
        out = out_LOI[expert]
        torch.addmm(out, left_AO[pairs].t(), right_AI[pairs], beta=0, alpha=scale, out=out)
    return out_LOI


def _sum(
    rows_AO: Tensor, like_LO: Tensor, segments: list[tuple[int, slice]], scale: float
) -> Tensor:
    """The gradient of a bias: the sum over the pairs of each expert, in fp32 or wider."""
    wide = torch.promote_types(rows_AO.dtype, torch.float32)
    out_LO = torch.zeros_like(like_LO)
    for expert, pairs in segments:
        out_LO[expert] = rows_AO[pairs].sum(0, dtype=wide) * scale
    return out_LO


def _scale(act_AF: Tensor, weight_A: Tensor) -> Tensor:
    # Formed in the weights' fp32 and rounded once.
    return (act_AF * weight_A.unsqueeze(1)).to(act_AF.dtype)
