"""The expert MLP in plain torch: one matrix product per expert over consecutive pairs.

The path of CPUs, of fp64 and of all that the Triton kernels do not cover. Routing weights are
applied on the narrow side of the down projection (F columns instead of H) and rounded once. The
number of pairs per expert has to be known on the host; unless the dispatch already brought it,
reading it is this path's one host sync.

On a CPU the experts are taken in blocks of about `_BLOCK` pairs, so that what lies between the
matrix products stays in the cache and its memory is used again instead of being asked for anew.
Of quantised experts one matrix at a time is dequantised, for its product, in forward and backward.
Dimension names: M pairs of a block, A all pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula, activate, activate_backward
from hf_moe_ep.ops.interface import (
    ExpertGrads,
    ExpertMatrices,
    ExpertWeights,
    LowRank,
    Routing,
    WeightGrads,
)
from hf_moe_ep.ops.permute import count_pairs, invert

_BLOCK = 2048


def route(
    expert_ids_RK: Tensor, counts_L: list[int] | None, experts: ExpertWeights, rows_RH: Tensor
) -> Routing:
    """Pairs sorted by expert, those without an expert here left out; for rows of any dtype."""
    if counts_L is None:
        counts_L = count_pairs(expert_ids_RK, experts.up.shape[0]).tolist()
    num_rows, top_k = expert_ids_RK.shape
    order = expert_ids_RK.flatten().argsort(stable=True)[: sum(counts_L)]
    pair_A = order.to(torch.int32)
    slots_RK = invert(order // top_k, order % top_k, (num_rows, top_k)).to(torch.int32)
    offsets = torch.tensor([0, *counts_L], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    unused = offsets.new_empty(0), offsets.new_empty(0)
    return Routing(pair_A, slots_RK, offsets, *unused)


def routing_shapes(
    num_pairs: int, num_experts: int, rows_RH: Tensor
) -> tuple[tuple[int, ...], ...]:
    """Shapes of pair_A, offsets, tiles and row_A, for torch.compile."""
    return (num_pairs,), (num_experts + 1,), (0,), (0,)


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
    down = _Forth(experts.down_matrices(rows_RH.dtype))
    for block in _blocks(routing, weights_RK):
        pre_MG = _pre_activations(
            rows_RH, experts, block, pre_AG[block.pairs] if keep_pre else None
        )
        act_MF = _scale(activate(pre_MG, formula), block.weight_M)
        y_MH = _adapted(act_MF, down, experts.down_adapter, block)
        if experts.down_bias is not None:
            for expert, (y, weight) in block.split(y_MH, block.weight_M.to(y_MH)):
                y.addcmul_(weight.unsqueeze(1), experts.down_bias[expert])
        _add_to_rows(y_MH, out_RH, block)
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
    need: set[str],
    later: bool = False,
) -> tuple[WeightGrads, Callable[[ExpertGrads], None] | None]:
    """Gradients of rows, weights and the experts' tensors; None where not in `need`.

    `pre_AG` None computes the pre-activations again. With `later` the gradients of the experts are
    left to the function that is returned; what they are made of is kept until it is called, for
    every pair: its gradient, its activation and the gradient of its pre-activations.
    """
    # Routers that compute in fp32 hand fp32 weights to rows in fp64.
    wide = torch.promote_types(weights_RK.dtype, rows_RH.dtype)
    grad_weights = weights_RK.new_zeros(weights_RK.numel()) if "weights" in need else None
    grad_rows_RH = _wide_zeros(rows_RH) if "rows" in need else None
    found = ExpertGrads()
    places = {} if later else _places(found, experts, routing, need)
    add = partial(_add_expert_grads, rows_RH=rows_RH, experts=experts, scale=grad_scale)
    up_back = experts.up_adapter and experts.up_adapter.transposed()
    down_back = experts.down_adapter and experts.down_adapter.transposed()
    up_matrices = _Back(experts.up_matrices(rows_RH.dtype))
    down_matrices = _Back(experts.down_matrices(rows_RH.dtype))
    kept: list[_Step] = []
    for block in _blocks(routing, weights_RK):
        kept_pre = None if pre_AG is None else pre_AG[block.pairs]
        pre_MG = _pre_activations(rows_RH, experts, block) if kept_pre is None else kept_pre
        grad_MH = grad_RH.index_select(0, block.row_M)
        grad_act_MF = _adapted(grad_MH, down_matrices, down_back, block)
        scaled_MF = _scale(grad_act_MF, block.weight_M)
        act_MF, grad_pre_MG = activate_backward(pre_MG, scaled_MF, formula)
        if grad_weights is not None:
            # Not vecdot: autocast, where backward runs under it, would round that.
            grad_M = (grad_act_MF.to(wide) * act_MF.to(wide)).sum(1)
            if experts.down_bias is not None:
                for expert, (grad, upstream) in block.split(grad_M, grad_MH):
                    grad += upstream.to(wide) @ experts.down_bias[expert].to(wide)
            grad_weights.index_copy_(0, block.pair_M, grad_M.to(grad_weights.dtype))
        if grad_rows_RH is not None:
            grad_x_MH = _adapted(grad_pre_MG, up_matrices, up_back, block)
            _add_to_rows(grad_x_MH, grad_rows_RH, block)
        step = _Step(block, grad_MH, act_MF, grad_pre_MG)
        if later:
            kept.append(step)
        else:
            add(step, places)
    grads = WeightGrads(
        rows=None if grad_rows_RH is None else grad_rows_RH.to(rows_RH.dtype),
        weights=None if grad_weights is None else grad_weights.view(weights_RK.shape),
        **found.take(),
    )

    def finish(into: ExpertGrads) -> None:
        places = _places(into, experts, routing, need)
        for step in kept:
            add(step, places)

    return grads, finish if later else None


@dataclass(frozen=True)
class _Place:
    """Memory for one gradient, and whether something is there already, to be added to."""

    grad: Tensor
    add: bool


def _places(
    grads: ExpertGrads, experts: ExpertWeights, routing: Routing, need: set[str]
) -> dict[str, _Place]:
    """Places of the gradients asked for; zero for experts without pairs."""
    wanted = {name: x for name, x in experts.named_tensors().items() if name in need}
    places = {name: _Place(*grads.place(name, tensor)) for name, tensor in wanted.items()}
    for expert, (start, end) in enumerate(itertools.pairwise(routing.offsets.tolist())):
        for place in places.values():
            if start == end and not place.add:
                place.grad[expert].zero_()
    return places


def _add_expert_grads(
    step: _Step, places: dict[str, _Place], *, rows_RH: Tensor, experts: ExpertWeights, scale: float
) -> None:
    """Compute the gradients of the experts of one block, in place."""
    block = step.block
    grad_MH = step.grad_MH
    if "down_bias" in places:
        _sum(_scale(grad_MH, block.weight_M), places["down_bias"], block, scale)
    if "up_bias" in places:
        _sum(step.grad_pre_MG, places["up_bias"], block, scale)
    if places.keys() & {"down", "down_a", "down_b"}:
        act_MF = _scale(step.act_MF, block.weight_M)
        if "down" in places:
            _outer(grad_MH, act_MF, places["down"], block, scale)
        into = (places.get("down_a"), places.get("down_b"))
        _add_low_rank_grads(act_MF, grad_MH, experts.down_adapter, into, block, scale)
    if places.keys() & {"up", "up_a", "up_b"}:
        x_MH = rows_RH.index_select(0, block.row_M)
        if "up" in places:
            _outer(step.grad_pre_MG, x_MH, places["up"], block, scale)
        into = (places.get("up_a"), places.get("up_b"))
        _add_low_rank_grads(x_MH, step.grad_pre_MG, experts.up_adapter, into, block, scale)


@dataclass(frozen=True)
class Block:
    """Consecutive pairs of whole experts; `experts` are those that have any, `sizes` how many."""

    pairs: slice
    experts: list[int]
    sizes: list[int]
    pair_M: Tensor
    row_M: Tensor
    weight_M: Tensor

    def split(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Each expert with its part of every tensor."""
        parts = zip(*(tensor.split(self.sizes) for tensor in tensors), strict=True)
        return zip(self.experts, parts, strict=True)


@dataclass(frozen=True)
class _Step:
    """Backward through one block: what the gradients of its experts are made of."""

    block: Block
    grad_MH: Tensor
    act_MF: Tensor
    grad_pre_MG: Tensor


def _blocks(routing: Routing, weights_RK: Tensor) -> Iterator[Block]:
    # A GPU has nothing to win by smaller pieces.
    on_cpu = routing.pair_A.device.type == "cpu"
    smallest = _BLOCK if on_cpu else len(routing.pair_A)
    pair_A = routing.pair_A.long()
    weights = weights_RK.flatten()
    ends = routing.offsets.tolist()
    experts: list[int] = []
    first = 0
    for expert, end in enumerate(ends[1:]):
        if end > ends[expert]:
            experts.append(expert)
        if experts and (end - first >= smallest or end == ends[-1]):
            pair_M = pair_A[first:end]
            row_M = pair_M // weights_RK.shape[1]
            weight_M = weights.index_select(0, pair_M)
            sizes = [ends[i + 1] - ends[i] for i in experts]
            yield Block(slice(first, end), experts, sizes, pair_M, row_M, weight_M)
            experts = []
            first = end


def _pre_activations(
    rows_RH: Tensor, experts: ExpertWeights, block: Block, out_MG: Tensor | None = None
) -> Tensor:
    x_MH = rows_RH.index_select(0, block.row_M)
    up = _Forth(experts.up_matrices(rows_RH.dtype))
    pre_MG = _per_expert(x_MH, up, block, bias_LO=experts.up_bias, out_MO=out_MG)
    _add_low_rank(x_MH, experts.up_adapter, pre_MG, block)
    return pre_MG


class _Forth:
    """Matrices from what comes in to what goes out."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        self._matrices = matrices
        self.num_out, _ = matrices.shape_OI

    def of(self, expert: int) -> Tensor:
        return self._matrices.of(expert).t()


class _Back:
    """The same, from gradients of what went out to those of what came in."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        self.of = matrices.of
        _, self.num_out = matrices.shape_OI


def _per_expert(
    rows_MI: Tensor,
    matrices: _Forth | _Back,
    block: Block,
    *,
    bias_LO: Tensor | None = None,
    out_MO: Tensor | None = None,
) -> Tensor:
    """The product of each pair's row and the matrix of its expert."""
    if out_MO is None:
        out_MO = rows_MI.new_empty(len(rows_MI), matrices.num_out)
    for expert, (rows, out) in block.split(rows_MI, out_MO):
        if bias_LO is None:
            torch.mm(rows, matrices.of(expert), out=out)
        else:
            torch.addmm(bias_LO[expert], rows, matrices.of(expert), out=out)
    return out_MO


def _adapted(
    rows_MI: Tensor, matrices: _Forth | _Back, adapter: LowRank | None, block: Block
) -> Tensor:
    """The product of each pair's row and the matrix of its expert, adapter included."""
    out_MO = _per_expert(rows_MI, matrices, block)
    _add_low_rank(rows_MI, adapter, out_MO, block)
    return out_MO


def _add_low_rank(rows_MI: Tensor, adapter: LowRank | None, out_MO: Tensor, block: Block) -> None:
    """Add each expert's adapter to the product with its matrix, in place."""
    if adapter is None:
        return
    for expert, (rows, out) in block.split(rows_MI, out_MO):
        low_MP = rows @ adapter.a_LPI[expert].t()
        out.addmm_(low_MP, adapter.b_LOP[expert].t(), alpha=adapter.scale)


def _add_low_rank_grads(
    rows_MI: Tensor,
    grad_MO: Tensor,
    adapter: LowRank | None,
    into: tuple[_Place | None, _Place | None],
    block: Block,
    scale: float,
) -> None:
    """Compute `scale` times the gradients of a_LPI and b_LOP, where wanted, in place."""
    if adapter is None:
        return
    a_LPI, b_LOP = into
    scale = scale * adapter.scale
    for expert, (rows, grad) in block.split(rows_MI, grad_MO):
        if a_LPI is not None:
            _product(grad @ adapter.b_LOP[expert], rows, a_LPI, expert, scale)
        if b_LOP is not None:
            _product(grad, rows @ adapter.a_LPI[expert].t(), b_LOP, expert, scale)


def _wide_zeros(rows_RH: Tensor) -> Tensor:
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    return rows_RH.new_zeros(rows_RH.shape, dtype=wide)


def _add_to_rows(y_MH: Tensor, sum_RH: Tensor, block: Block) -> None:
    """Add each pair's vector to its row, in the order of the pairs."""
    if not y_MH.is_cuda:
        sum_RH.index_add_(0, block.row_M, y_MH.to(sum_RH.dtype))
        return
    # On a GPU index_add_ is atomic, in any order; within one expert no two additions meet.
    for _, (y, row) in block.split(y_MH, block.row_M):
        sum_RH.index_add_(0, row, y.to(sum_RH.dtype))


def _outer(left_MO: Tensor, right_MI: Tensor, place: _Place, block: Block, scale: float) -> None:
    """Compute `scale * left^T right` over the pairs of each expert of the block, in place."""
    for expert, (left, right) in block.split(left_MO, right_MI):
        _product(left, right, place, expert, scale)


def _product(left: Tensor, right: Tensor, place: _Place, expert: int, scale: float) -> None:
    """Compute `scale * left^T right` of one expert in place, in the dtype of the place."""
    out = place.grad[expert]
    left, right = left.to(out.dtype), right.to(out.dtype)
    torch.addmm(out, left.t(), right, beta=int(place.add), alpha=scale, out=out)


def _sum(rows_MO: Tensor, place: _Place, block: Block, scale: float) -> None:
    """Compute the gradient of a bias: sum the pairs of each expert, in fp32 or wider."""
    wide = torch.promote_types(rows_MO.dtype, torch.float32)
    for expert, (rows,) in block.split(rows_MO):
        sum_O = rows.sum(0, dtype=wide) * scale
        place.grad[expert] = place.grad[expert] + sum_O if place.add else sum_O


def _scale(act_MF: Tensor, weight_M: Tensor) -> Tensor:
    # Formed in the weights' fp32 and rounded once.
    return (act_MF * weight_M.unsqueeze(1)).to(act_MF.dtype)
