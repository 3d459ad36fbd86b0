"""The expert MLP in plain torch: one matrix product per expert over consecutive pairs.

The path of CPUs, of fp64 and of all that the Triton kernels do not cover. Routing weights are
applied on the narrow side of the down projection (F columns instead of H) and rounded once. The
number of pairs per expert has to be known on the host; unless the dispatch already brought it,
reading it is this path's one host sync.

On a CPU the experts are taken in blocks of about `_BLOCK` pairs, so that what lies between the
matrix products stays in the cache and its memory is used again instead of being asked for anew.
Dimension names: B pairs of a block, A all pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula, activate, activate_backward
from hf_moe_ep.ops.interface import WEIGHT_NAMES, ExpertWeights, LowRank, Routing, WeightGrads
from hf_moe_ep.ops.permute import count_pairs, invert

_BLOCK = 2048


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
    formula: ExpertFormula,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    """out_RH, and the pre-activations pre_AG if they are to be kept (no rows otherwise)."""
    pre_AG = rows_RH.new_empty(len(routing.pair_A) if keep_pre else 0, experts.up.shape[1])
    out_RH = _wide_zeros(rows_RH)
    for block in _blocks(routing, weights_RK):
        pre_BG = _pre_activations(
            rows_RH, experts, block, pre_AG[block.pairs] if keep_pre else None
        )
        act_BF = _scale(activate(pre_BG, formula), block.weight_B)
        y_BH = _adapted(act_BF, experts.down.transpose(1, 2), experts.down_adapter, block)
        if experts.down_bias is not None:
            for expert, (y, weight) in block.split(y_BH, block.weight_B.to(y_BH)):
                y.addcmul_(weight.unsqueeze(1), experts.down_bias[expert])
        _add_to_rows(y_BH, out_RH, block)
    return out_RH.to(rows_RH.dtype), pre_AG


def backward(
    grad_RH: Tensor,
    rows_RH: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    routing: Routing,
    pre_AG: Tensor | None,
    formula: ExpertFormula,
    *,
    grad_scale: float,
    needs: list[bool],
    later: bool = False,
) -> tuple[WeightGrads, Callable[[], WeightGrads] | None]:
    """Gradients of rows, weights and the experts' tensors; None where not in `needs`.

    `pre_AG` None computes the pre-activations again. With `later` the gradients of the experts are
    left to the function that is returned; what they are made of is kept until it is called, for
    every pair: its gradient, its activation and the gradient of its pre-activations.
    """
    need_rows, need_weights = needs[:2]
    wide = weights_RK.dtype
    grad_weights = weights_RK.new_zeros(weights_RK.numel()) if need_weights else None
    grad_rows_RH = _wide_zeros(rows_RH) if need_rows else None
    grads = WeightGrads() if later else _empty_expert_grads(experts, routing, needs)
    add = partial(_add_expert_grads, rows_RH=rows_RH, experts=experts, scale=grad_scale)
    up_back, down_back = (
        adapter and adapter.transposed() for adapter in (experts.up_adapter, experts.down_adapter)
    )
    kept: list[_Step] = []
    for block in _blocks(routing, weights_RK):
        kept_pre = None if pre_AG is None else pre_AG[block.pairs]
        pre_BG = _pre_activations(rows_RH, experts, block) if kept_pre is None else kept_pre
        grad_BH = grad_RH.index_select(0, block.row_B)
        grad_act_BF = _adapted(grad_BH, experts.down, down_back, block)
        scaled_BF = _scale(grad_act_BF, block.weight_B)
        act_BF, grad_pre_BG = activate_backward(pre_BG, scaled_BF, formula)
        if grad_weights is not None:
            # Not vecdot: autocast, where backward runs under it, would round that.
            grad_B = (grad_act_BF.to(wide) * act_BF.to(wide)).sum(1)
            if experts.down_bias is not None:
                for expert, (grad, upstream) in block.split(grad_B, grad_BH):
                    grad += upstream.to(wide) @ experts.down_bias[expert].to(wide)
            grad_weights.index_copy_(0, block.pair_B, grad_B)
        if grad_rows_RH is not None:
            _add_to_rows(_adapted(grad_pre_BG, experts.up, up_back, block), grad_rows_RH, block)
        step = _Step(block, grad_BH, act_BF, grad_pre_BG)
        if later:
            kept.append(step)
        else:
            add(step, grads)
    grads.rows = None if grad_rows_RH is None else grad_rows_RH.to(rows_RH.dtype)
    grads.weights = None if grad_weights is None else grad_weights.view_as(weights_RK)

    def finish() -> WeightGrads:
        expert_grads = _empty_expert_grads(experts, routing, needs)
        for step in kept:
            add(step, expert_grads)
        return expert_grads

    return grads, finish if later else None


def _add_expert_grads(
    step: _Step, grads: WeightGrads, *, rows_RH: Tensor, experts: ExpertWeights, scale: float
) -> None:
    """The gradients of the experts of one block, in place."""
    block, grad_BH = step.block, step.grad_BH
    if grads.down_bias is not None:
        _sum(_scale(grad_BH, block.weight_B), grads.down_bias, block, scale)
    if grads.up_bias is not None:
        _sum(step.grad_pre_BG, grads.up_bias, block, scale)
    if any(grad is not None for grad in (grads.down, grads.down_a, grads.down_b)):
        act_BF = _scale(step.act_BF, block.weight_B)
        if grads.down is not None:
            _outer(grad_BH, act_BF, grads.down, block, scale)
        into = (grads.down_a, grads.down_b)
        _add_low_rank_grads(act_BF, grad_BH, experts.down_adapter, into, block, scale)
    if any(grad is not None for grad in (grads.up, grads.up_a, grads.up_b)):
        x_BH = rows_RH.index_select(0, block.row_B)
        if grads.up is not None:
            _outer(step.grad_pre_BG, x_BH, grads.up, block, scale)
        into = (grads.up_a, grads.up_b)
        _add_low_rank_grads(x_BH, step.grad_pre_BG, experts.up_adapter, into, block, scale)


@dataclass(frozen=True)
class _Block:
    """The consecutive pairs `pairs` of whole experts; `experts` that have any, and their sizes."""

    pairs: slice
    experts: list[int]
    sizes: list[int]
    pair_B: Tensor
    row_B: Tensor
    weight_B: Tensor

    def split(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Each expert with its part of every tensor."""
        parts = zip(*(tensor.split(self.sizes) for tensor in tensors), strict=True)
        return zip(self.experts, parts, strict=True)


@dataclass(frozen=True)
class _Step:
    """Backward through one block: what the gradients of its experts are made of."""

    block: _Block
    grad_BH: Tensor
    act_BF: Tensor
    grad_pre_BG: Tensor


def _blocks(routing: Routing, weights_RK: Tensor) -> Iterator[_Block]:
    # A GPU has nothing to win by smaller pieces.
    on_cpu = routing.pair_A.device.type == "cpu"
    smallest = _BLOCK if on_cpu else len(routing.pair_A)
    pair_A, weights = routing.pair_A.long(), weights_RK.flatten()
    ends = routing.offsets.tolist()
    experts: list[int] = []
    first = 0
    for expert, end in enumerate(ends[1:]):
        if end > ends[expert]:
            experts.append(expert)
        if experts and (end - first >= smallest or end == ends[-1]):
            pair_B = pair_A[first:end]
            row_B, weight_B = pair_B // weights_RK.shape[1], weights.index_select(0, pair_B)
            sizes = [ends[i + 1] - ends[i] for i in experts]
            yield _Block(slice(first, end), experts, sizes, pair_B, row_B, weight_B)
            experts, first = [], end


def _pre_activations(
    rows_RH: Tensor, experts: ExpertWeights, block: _Block, out_BG: Tensor | None = None
) -> Tensor:
    x_BH = rows_RH.index_select(0, block.row_B)
    matrix_LHG = experts.up.transpose(1, 2)
    pre_BG = _per_expert(x_BH, matrix_LHG, block, bias_LO=experts.up_bias, out_BO=out_BG)
    _add_low_rank(x_BH, experts.up_adapter, pre_BG, block)
    return pre_BG


def _per_expert(
    rows_BI: Tensor,
    matrix_LIO: Tensor,
    block: _Block,
    *,
    bias_LO: Tensor | None = None,
    out_BO: Tensor | None = None,
) -> Tensor:
    """Each pair's row times the matrix of its expert."""
    if out_BO is None:
        out_BO = rows_BI.new_empty(len(rows_BI), matrix_LIO.shape[2])
    for expert, (rows, out) in block.split(rows_BI, out_BO):
        if bias_LO is None:
            torch.mm(rows, matrix_LIO[expert], out=out)
        else:
            torch.addmm(bias_LO[expert], rows, matrix_LIO[expert], out=out)
    return out_BO


def _adapted(rows_BI: Tensor, matrix_LIO: Tensor, adapter: LowRank | None, block: _Block) -> Tensor:
    """Each pair's row times the matrix of its expert and what is beside it."""
    out_BO = _per_expert(rows_BI, matrix_LIO, block)
    _add_low_rank(rows_BI, adapter, out_BO, block)
    return out_BO


def _add_low_rank(rows_BI: Tensor, adapter: LowRank | None, out_BO: Tensor, block: _Block) -> None:
    """What each expert's adapter adds to the product with its matrix, in place."""
    if adapter is None:
        return
    for expert, (rows, out) in block.split(rows_BI, out_BO):
        low_BP = rows @ adapter.a_LPI[expert].t()
        out.addmm_(low_BP, adapter.b_LOP[expert].t(), alpha=adapter.scale)


def _add_low_rank_grads(
    rows_BI: Tensor,
    grad_BO: Tensor,
    adapter: LowRank | None,
    into: tuple[Tensor | None, Tensor | None],
    block: _Block,
    scale: float,
) -> None:
    """`scale` times the gradients of a_LPI and b_LOP, where wanted."""
    if adapter is None:
        return
    a_LPI, b_LOP = into
    scale = scale * adapter.scale
    for expert, (rows, grad) in block.split(rows_BI, grad_BO):
        if a_LPI is not None:
            back_BP = grad @ adapter.b_LOP[expert]
            torch.addmm(a_LPI[expert], back_BP.t(), rows, beta=0, alpha=scale, out=a_LPI[expert])
        if b_LOP is not None:
            low_BP = rows @ adapter.a_LPI[expert].t()
            torch.addmm(b_LOP[expert], grad.t(), low_BP, beta=0, alpha=scale, out=b_LOP[expert])


def _empty_expert_grads(experts: ExpertWeights, routing: Routing, needs: list[bool]) -> WeightGrads:
    """Memory for the gradients asked for; zero for experts without pairs."""
    wanted = needs[2:] + [False] * (len(WEIGHT_NAMES) - len(needs[2:]))
    grads = [
        torch.empty_like(tensor) if tensor is not None and need else None
        for tensor, need in zip(experts.tensors(), wanted, strict=True)
    ]
    for expert, (start, end) in enumerate(itertools.pairwise(routing.offsets.tolist())):
        for grad in grads:
            if start == end and grad is not None:
                grad[expert].zero_()
    return WeightGrads(None, None, *grads)


def _wide_zeros(rows_RH: Tensor) -> Tensor:
    return torch.zeros_like(rows_RH, dtype=torch.promote_types(rows_RH.dtype, torch.float32))


def _add_to_rows(y_BH: Tensor, sum_RH: Tensor, block: _Block) -> None:
    """Adds each pair's vector to its row, in the order of the pairs."""
    if not y_BH.is_cuda:
        sum_RH.index_add_(0, block.row_B, y_BH.to(sum_RH.dtype))
        return
    # On a GPU index_add_ is atomic, in any order; within one expert no two additions meet.
    for _, (y, row) in block.split(y_BH, block.row_B):
        sum_RH.index_add_(0, row, y.to(sum_RH.dtype))


def _outer(left_BO: Tensor, right_BI: Tensor, out_LOI: Tensor, block: _Block, scale: float) -> None:
    """`scale * left^T right` over the pairs of each expert of the block."""
    for expert, (left, right) in block.split(left_BO, right_BI):
        out = out_LOI[expert]
        torch.addmm(out, left.t(), right, beta=0, alpha=scale, out=out)


def _sum(rows_BO: Tensor, out_LO: Tensor, block: _Block, scale: float) -> None:
    """The gradient of a bias: the sum over the pairs of each expert, in fp32 or wider."""
    wide = torch.promote_types(rows_BO.dtype, torch.float32)
    for expert, (rows,) in block.split(rows_BO):
        out_LO[expert] = rows.sum(0, dtype=wide) * scale


def _scale(act_BF: Tensor, weight_B: Tensor) -> Tensor:
    # Formed in the weights' fp32 and rounded once.
    return (act_BF * weight_B.unsqueeze(1)).to(act_BF.dtype)
