"""The expert MLP as two operators of torch.library, and the gradient that joins them.

torch.compile and activation checkpointing see `hf_moe_ep::expert_mlp` and its backward, and
nothing inside them.

    expert_mlp(rows, weights, experts[], expert_ids, counts, spec) -> out, *made
    expert_mlp_backward(grad, saved[], spec, needs[]) -> grads[]

    experts    the tensors that there are, of WEIGHT_NAMES: `Tensor[]`. A `Tensor?[]` with None in
               it gets no gradients from torch.library (it takes only lists of tensors apart), so
               `spec` says which tensors these are
    made       for backward: pre_AG (empty unless kept), pair_A, slots_RK, offsets, tiles,
               row_A
    saved      rows, weights, *experts, *made
    spec       everything else: `spec.ExpertSpec`, as text
    needs      of rows, weights and each of experts: whether its gradient is wanted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.interface import (
    ExpertGrads,
    ExpertWeights,
    Routing,
    WeightGrads,
    empty_grad,
)
from hf_moe_ep.ops.spec import ExpertSpec


def _kernels() -> Any:
    # Triton is imported by those who can use it.
    from hf_moe_ep.ops import triton_mlp

    return triton_mlp


def _implementation(
    call: ExpertSpec,
    rows_RH: Tensor,
    weights_RK: Tensor,
    num_pairs: int,
    experts: ExpertWeights,
    *also_trained: tuple[str, ...],
) -> Any:
    """What computes a call forward and, for what is trained or `also_trained`, backward.

    Raises:
        RuntimeError: where it is the kernels by name, and they cannot run here.
    """
    if call.backend == "torch":
        return torch_mlp
    from hf_moe_ep.ops.self_check import self_check, warn_once

    for trained in (call.trained, *also_trained):
        reason = self_check(rows_RH, weights_RK, num_pairs, experts, call, trained)
        if reason and call.backend == "triton":
            raise RuntimeError(
                f"experts_backend='triton' cannot run here: {reason}; use "
                f"experts_backend='auto' or 'torch'"
            )
        if reason:
            warn_once(weights_RK.device, reason)
            return torch_mlp
    return _kernels()


def _as_promised(routing: Routing, num_experts: int, rows_RH: Tensor) -> Routing:
    """A routing of the torch path in the shapes and on the device of the kernels'.

    torch.compile was promised those, before anybody could know that the kernels do not run.
    """
    num_pairs = routing.pair_A.numel()
    _, _, tiles, rows = _kernels().routing_shapes(num_pairs, num_experts, rows_RH)
    offsets = routing.offsets.to(rows_RH.device)
    unused = offsets.new_full(tiles, -1), offsets.new_zeros(rows)
    return replace(routing, offsets=offsets, tiles=unused[0], row_A=unused[1])


def _forward(
    rows: Tensor,
    weights: Tensor,
    experts: Sequence[Tensor],
    expert_ids: Tensor,
    counts: Sequence[int] | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out_RH and what backward needs; see the module."""
    call = ExpertSpec.from_text(spec)
    named = call.experts(experts)
    counts_L = None if counts is None else list(counts)
    num_pairs = expert_ids.numel() if counts_L is None else sum(counts_L)
    implementation = _implementation(call, rows, weights, num_pairs, named)
    routing = implementation.route(expert_ids, counts_L, named, rows)
    out_RH, pre_AG = implementation.forward(
        rows, weights, named, routing, call.formula, call.keep_pre
    )
    if not call.keep_pre:
        pre_AG = rows.new_empty(0)
    if call.backend == "auto" and implementation is torch_mlp:
        routing = _as_promised(routing, named.up.shape[0], rows)
    made = routing.pair_A, routing.slots_RK, routing.offsets, routing.tiles, routing.row_A
    return out_RH, pre_AG, *made


_forward_op = torch.library.custom_op("hf_moe_ep::expert_mlp", mutates_args=())(_forward)


@_forward_op.register_fake
def _(
    rows: Tensor,
    weights: Tensor,
    experts: Sequence[Tensor],
    expert_ids: Tensor,
    counts: Sequence[int] | None,
    spec: str,
) -> tuple[Tensor, ...]:
    call = ExpertSpec.from_text(spec)
    up = call.experts(experts).up
    num_pairs = expert_ids.numel() if counts is None else sum(counts)
    pre = rows.new_empty(num_pairs, up.shape[1]) if call.keep_pre else rows.new_empty(0)
    slots = expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)
    promised = torch_mlp if call.backend == "torch" else _kernels()
    shapes = promised.routing_shapes(num_pairs, up.shape[0], rows)
    device = "cpu" if call.backend == "torch" else rows.device
    pair, offsets, tiles, row = (
        torch.empty(shape, dtype=torch.int32, device=where)
        for shape, where in zip(shapes, (rows.device, device, device, device), strict=True)
    )
    return rows.new_empty(rows.shape), pre, pair, slots, offsets, tiles, row


def _run_for_needs(
    grad: Tensor, saved: Sequence[Tensor], spec: str, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of rows, weights and each of the experts' tensors; empty where not in `needs`."""
    names = ExpertSpec.from_text(spec).names
    grads, _ = run_backward(grad, saved, spec, needs)
    # Scales have no place there: what is quantised is frozen.
    found = (getattr(grads, name, None) for name in names)
    return [grad.new_empty(0) if g is None else g for g in found]


_backward_op = torch.library.custom_op("hf_moe_ep::expert_mlp_backward", mutates_args=())(
    _run_for_needs
)


@_backward_op.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], spec: str, needs: Sequence[bool]) -> list[Tensor]:
    inputs = saved[: len(needs)]
    return [
        empty_grad(tensor) if need else grad.new_empty(0)
        for tensor, need in zip(inputs, needs, strict=True)
    ]


def run_backward(
    grad_RH: Tensor,
    saved: Sequence[Tensor],
    spec: str,
    needs: Sequence[bool],
    *,
    later: bool = False,
) -> tuple[WeightGrads, Callable[[ExpertGrads], None] | None]:
    """Run the implementation's backward on what `save` has kept; returns what it returns."""
    call = ExpertSpec.from_text(spec)
    names = call.names
    rows_RH, weights_RK, *experts = saved[: len(names)]
    pre_AG, *made = saved[len(names) :]
    routing = Routing(*made)
    named = call.experts(experts)
    need = tuple(name for name, wanted in zip(names, needs, strict=True) if wanted)
    num_pairs = routing.pair_A.numel()
    implementation = _implementation(call, rows_RH, weights_RK, num_pairs, named, need)
    return implementation.backward(
        grad_RH,
        rows_RH,
        weights_RK,
        named,
        routing,
        pre_AG if call.keep_pre else None,
        call.formula,
        grad_scale=call.grad_scale,
        need=set(need),
        later=later,
    )


def save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    """Keep in `ctx` what backward takes, from the forward's inputs and output."""
    rows, weights, experts, _, _, spec = inputs
    _, *made = output
    ctx.save_for_backward(rows, weights, *experts, *made)
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)
    ctx.spec = spec


def _backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Any, ...]:
    """Gradients in the structure of the forward's inputs."""
    need_rows, need_weights, need_experts, *_ = ctx.needs_input_grad
    needs = [need_rows, need_weights, *need_experts]
    if grad_RH is None:
        wanted: list[Tensor | None] = [None] * len(needs)
    else:
        backward = torch.ops.hf_moe_ep.expert_mlp_backward
        grads = backward(grad_RH, ctx.saved_tensors, ctx.spec, needs)
        wanted = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    rows, weights, *experts = wanted
    return rows, weights, experts, None, None, None


_forward_op.register_autograd(_backward, setup_context=save)

# For whoever wants to see what the operators do one step after the other.
STEPS_INSIDE: dict[Any, Callable[..., Any]] = {
    torch.ops.hf_moe_ep.expert_mlp.default: _forward,
    torch.ops.hf_moe_ep.expert_mlp_backward.default: _run_for_needs,
}
