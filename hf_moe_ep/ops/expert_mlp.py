"""down(f(gate(x)) * up(x)) for every (row, expert) pair, weighted and summed per row.

Rows are sorted by expert once, so each expert is one matrix product over consecutive pairs. With
two experts, top-2 and row 1 going to expert 0 only (L = 2 means "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   ->   pairs by expert: 0: rows 0, 1    1: row 0

Saved for backward: the rows, the pre-activations of each pair and the routing (with `recompute`
the rows and the routing). The activation is recomputed, and the routing weights' gradient needs
no expert output: with `out += w (down @ a)` it is `<grad, down @ a> = <down^T grad, a>`, whose
left factor the backward computes anyway (SonicMoE, arXiv 2512.14080, section 4).

Two implementations, `torch_mlp` and `triton_mlp`, behind one pair of torch.library operators:
torch.compile and activation checkpointing see `hf_moe_ep::expert_mlp` and nothing inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.autograd import mark_without_grad, nothing
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import (
    WEIGHT_NAMES,
    ExpertWeights,
    LateGrads,
    Routing,
    WeightGrads,
)

# Tensors that may want a gradient, and all inputs of the operator.
_NUM_TENSORS = 2 + len(WEIGHT_NAMES)
_NUM_INPUTS = _NUM_TENSORS + 13


def expert_mlp(
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    experts: ExpertWeights,
    formula: ExpertFormula,
    *,
    counts_L: list[int] | None = None,
    grad_scale: float = 1.0,
    recompute: bool = False,
    backend: str = "torch",
) -> Tensor:
    """out_RH: the weighted sum of the experts of each row; zero for a row without experts.

    Args:
        rows_RH: in the dtype of the experts' weights.
        expert_ids_RK: int64, 0..L-1, or L for "no expert here"; a row names an expert at most
            once.
        weights_RK: fp32 or the dtype of the rows.
        counts_L: pairs per expert, if the host knows them. None where every id names an expert:
            R * K pairs.
        grad_scale: multiplies the gradients of the experts' own tensors, and nothing else.
        recompute: compute the pre-activations again in backward instead of keeping them.
        backend: "torch", or "triton" for tensors that `triton_mlp.covers`.
    """
    tensors = (rows_RH, weights_RK, *experts.tensors())
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    inputs = (
        *tensors,
        expert_ids_RK,
        counts_L,
        formula.gated,
        formula.interleaved,
        formula.activation,
        formula.alpha,
        formula.limit,
        formula.up_offset,
        experts.up_scale,
        experts.down_scale,
        grad_scale,
        grad and not recompute,
        backend,
    )
    if experts.late is None:
        out_RH, *_ = torch.ops.hf_moe_ep.expert_mlp(*inputs)
    else:
        out_RH, *_ = _RowsFirst.apply(experts.late, *inputs)
    return out_RH


def postpone_grads(experts: ExpertWeights) -> ExpertWeights:
    """The same weights for one `expert_mlp`, which in backward leaves their gradients to a node
    that is made here.

    Of the nodes that are ready, autograd runs the one made last. Called between two functions that
    send rows away and take them in, it puts the weights' gradients between their backwards: while
    the rows' gradients travel.
    """
    named = zip(WEIGHT_NAMES, experts.tensors(), strict=True)
    tensors = {name: tensor for name, tensor in named if tensor is not None}
    wanted = any(tensor.requires_grad for tensor in tensors.values())
    if not (wanted and torch.is_grad_enabled()):
        return experts
    late = LateGrads()
    postponed = _Postpone.apply(late, tuple(tensors), *tensors.values())
    return replace(experts, late=late, **dict(zip(tensors, postponed, strict=True)))


class _Postpone(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, late: LateGrads, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.late, ctx.names = late, names
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        mark_without_grad(ctx, outputs, ctx.needs_input_grad[2:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        finish, ctx.late.finish = ctx.late.finish, None
        grads = WeightGrads() if finish is None else finish()
        return (None, None, *(getattr(grads, name) for name in ctx.names))


class _RowsFirst(torch.autograd.Function):
    """The operator, in whose backward the gradients of the experts are left for later."""

    @staticmethod
    def forward(ctx: Any, late: LateGrads, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.late = late
        output = torch.ops.hf_moe_ep.expert_mlp(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        num_inputs = len(ctx.needs_input_grad)
        if grad_RH is None:
            return (None,) * num_inputs
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1 : 1 + _NUM_TENSORS]
        grads, ctx.late.finish = _run_backward(grad_RH, saved, ctx.options, needs, later=True)
        pairs = zip(saved[2:_NUM_TENSORS], needs[2:], strict=True)
        late = [nothing(tensor, tensor.shape) if need else None for tensor, need in pairs]
        others = (None,) * (num_inputs - 1 - _NUM_TENSORS)
        return (None, grads.rows, grads.weights, *late, *others)


def _implementation(backend: str) -> Any:
    if backend == "triton":
        # Triton is imported by those who can use it.
        from hf_moe_ep.ops import triton_mlp

        return triton_mlp
    return torch_mlp


def _run_backward(
    grad_RH: Tensor,
    saved: Sequence[Any],
    options: Sequence[Any],
    needs: Sequence[bool],
    later: bool = False,
) -> tuple[WeightGrads, Callable[[], WeightGrads] | None]:
    """What the implementation's backward returns, from what `_setup_context` keeps."""
    *tensors, pre_AG, pair_A, slots_RK, offsets, tiles = saved
    *formula, up_scale, down_scale, grad_scale, kept_pre, backend = options
    return _implementation(backend).backward(
        grad_RH,
        *tensors[:2],
        replace(ExpertWeights(*tensors[2:]), up_scale=up_scale, down_scale=down_scale),
        Routing(pair_A, slots_RK, offsets, tiles),
        pre_AG if kept_pre else None,
        ExpertFormula(*formula),
        grad_scale=grad_scale,
        needs=list(needs),
        later=later,
    )


@torch.library.custom_op("hf_moe_ep::expert_mlp", mutates_args=())
def _forward_op(
    rows: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    expert_ids: Tensor,
    counts: Sequence[int] | None,
    gated: bool,
    interleaved: bool,
    activation: str,
    alpha: float,
    limit: float,
    up_offset: float,
    up_scale: float,
    down_scale: float,
    grad_scale: float,
    keep_pre: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out_RH, pre_AG (empty unless kept), and the routing: pair_A, slots_RK, offsets, tiles."""
    formula = ExpertFormula(gated, interleaved, activation, alpha, limit, up_offset)
    adapters = (up_a, up_b, down_a, down_b, up_scale, down_scale)
    experts = ExpertWeights(up, up_bias, down, down_bias, *adapters)
    implementation = _implementation(backend)
    counts_L = None if counts is None else list(counts)
    if backend == "triton":
        from hf_moe_ep.ops.self_check import self_check

        num_pairs = expert_ids.numel() if counts_L is None else sum(counts_L)
        self_check(weights.shape[1], num_pairs, experts, formula)
    routing = implementation.route(expert_ids, counts_L, experts)
    out_RH, pre_AG = implementation.forward(rows, weights, experts, routing, formula, keep_pre)
    if not keep_pre:
        pre_AG = rows.new_empty(0)
    return out_RH, pre_AG, routing.pair_A, routing.slots_RK, routing.offsets, routing.tiles


@torch.library.custom_op("hf_moe_ep::expert_mlp_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    rows: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    pre: Tensor,
    pair: Tensor,
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    gated: bool,
    interleaved: bool,
    activation: str,
    alpha: float,
    limit: float,
    up_offset: float,
    up_scale: float,
    down_scale: float,
    grad_scale: float,
    kept_pre: bool,
    backend: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of the first inputs of the forward, all tensors; empty where not in `needs`."""
    experts = (up, up_bias, down, down_bias, up_a, up_b, down_a, down_b)
    saved = (rows, weights, *experts, pre, pair, slots, offsets, tiles)
    formula = (gated, interleaved, activation, alpha, limit, up_offset, up_scale, down_scale)
    grads, _ = _run_backward(grad, saved, (*formula, grad_scale, kept_pre, backend), needs)
    return [grad.new_empty(0) if g is None else g for g in grads.as_list()]


@_forward_op.register_fake
def _(
    rows: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    expert_ids: Tensor,
    counts: Sequence[int] | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    keep_pre, backend = rest[-2:]
    pairs = expert_ids.numel() if counts is None else sum(counts)
    shapes = _implementation(backend).routing_shapes(pairs, up)
    device = "cpu" if backend == "torch" else rows.device
    pre = rows.new_empty(pairs, up.shape[1]) if keep_pre else rows.new_empty(0)
    slots = expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)
    pair, offsets, tiles = (
        torch.empty(shape, dtype=torch.int32, device=where)
        for shape, where in zip(shapes, (rows.device, device, device), strict=True)
    )
    return torch.empty_like(rows), pre, pair, slots, offsets, tiles


@_backward_op.register_fake
def _(grad: Tensor, *rest: Any) -> list[Tensor]:
    needs = rest[-1]
    return [
        torch.empty_like(tensor) if need else grad.new_empty(0)
        for tensor, need in zip(rest[:_NUM_TENSORS], needs, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Behind expert_ids and counts.
    ctx.options = inputs[_NUM_TENSORS + 2 :]


def _backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_RH is None:
        return (None,) * _NUM_INPUTS
    needs = list(ctx.needs_input_grad[:_NUM_TENSORS])
    grads = torch.ops.hf_moe_ep.expert_mlp_backward(
        grad_RH, *ctx.saved_tensors, *ctx.options, needs
    )
    wanted = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (*wanted, *(None,) * (_NUM_INPUTS - len(wanted)))


_forward_op.register_autograd(_backward, setup_context=_setup_context)
