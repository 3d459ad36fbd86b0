"""Compute down(f(gate(x)) * up(x)) for all (row, expert) pairs, and add up the pairs of each row.

`postpone_grads` makes `expert_mlp` compute the gradients of the weights later, while gradients of
rows are being sent to other ranks.

The pairs are sorted by expert once, so each expert needs one matrix product over consecutive pairs.
In this example there are two experts and top-2 routing. Row 1 goes to expert 0 only (the id L = 2
means "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   ->   sorted pairs: rows 0, 1 for expert 0, row 0 for expert 1

The forward saves the rows, the pre-activations of each pair and the routing for backward, which
computes the activations again. With `recompute` the forward saves only the rows and the routing,
and backward computes the pre-activations again as well. The gradient of the routing weights needs
no expert output: with `out += w (down @ a)` this gradient is `<grad, down @ a> = <down^T grad, a>`,
and backward computes `down^T grad` anyway (SonicMoE, arXiv 2512.14080, section 4).

The operators of `operators.py` call one of the two implementations, `torch_mlp` or `triton_mlp`.
With postponed gradients, and if neither torch.compile nor a mode has to see an operator, the
implementation is called without the operator, which takes the host less time.

A `TorchFunctionMode` does not see the calls inside an operator. All other calls of implementations
are hidden from such modes as well, so a mode changes neither forward nor backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import make_placeholder_grad, mark_without_grad, refuse_tangents
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import (
    WEIGHT_NAMES,
    ExpertGrads,
    ExpertWeights,
    Masters,
    PostponedGrads,
)
from hf_moe_ep.ops.operators import (
    INPUT_NAMES,
    Settings,
    run_backward,
    run_forward,
    save_for_backward,
)
from hf_moe_ep.upstream.autograd_modes import hidden_from_function_modes, operators_are_observed


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
    skip_output: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return out_RH, each row's weighted sum of expert outputs (0 if no expert of the row is here).

    Args:
        rows_RH: the inputs, in the dtype of the experts' weights. Quantised weights are dequantised
            to the dtype of the rows, and master weights are cast to it.
        expert_ids_RK: int64, 0..L-1, or L for "no expert here". A row names an expert at most
            once.
        weights_RK: the routing weights, in fp32 or in the dtype of the rows.
        counts_L: the number of pairs of each expert, if the host knows these numbers. None is
            allowed only if every id names an expert, so that there are R * K pairs.
        grad_scale: a factor for the gradients of the experts' own tensors. The gradients of rows
            and routing weights are not multiplied.
        recompute: compute the pre-activations again in backward instead of keeping them.
        skip_output: compute only the tensors that backward needs, and return a tensor without
            memory, whose values are NaN.
        backend: "torch", "triton" or "auto". The last two need rows that `triton_mlp.covers`
            accepts. "auto" uses the kernels. If the kernels cannot be built for the GPU, or do not
            fit into it, "auto" warns and uses torch.
    """
    masters = experts.masters if experts.postponed is None else None
    if masters is not None and _need_grad(experts.named_tensors().values()):
        # `postpone_grads` was not called for these trainable masters, so autograd casts them here,
        # and casts their gradients back.
        dtype = masters.dtype
        up, down = experts.up.to(dtype), experts.down.to(dtype)
        experts = replace(experts, up=up, down=down, masters=None)
    tensors = [getattr(experts, name) for name in WEIGHT_NAMES]
    inputs = (rows_RH, weights_RK, *tensors)
    refuse_tangents(
        inputs,
        "the experts of hf_moe_ep; run those of the model: experts_backend='eager', ep_size=1",
    )
    named = zip(INPUT_NAMES, inputs, strict=True)
    trained = [name for name, x in named if x is not None and x.requires_grad]
    has_backward = bool(trained) and torch.is_grad_enabled()
    settings = Settings(
        gated=formula.gated,
        interleaved=formula.interleaved,
        keep_pre=has_backward and not recompute,
        skip_output=skip_output,
        alpha=formula.alpha,
        limit=formula.limit,
        up_offset=formula.up_offset,
        gate_cap=formula.gate_cap,
        up_cap=formula.up_cap,
        up_scale=experts.up_scale,
        down_scale=experts.down_scale,
        grad_scale=grad_scale,
        activation=formula.activation,
        quantised=experts.quantised,
        backend=backend,
        trained=tuple(trained) if has_backward else (),
    )
    postponed = experts.postponed
    if postponed is None and experts.masters is not None and has_backward:
        # The experts are frozen, so nothing is postponed. `_PostponingExpertMLP` is used because it
        # saves the masters for backward, not their copies.
        postponed = PostponedGrads()
    if postponed is None:
        cast = _cast_masters(inputs, experts.masters)
        out_RH, *_ = _call_operator(cast, expert_ids_RK, counts_L, settings)
    else:
        call = (postponed, experts.masters, settings, expert_ids_RK, counts_L)
        out_RH, *_ = _PostponingExpertMLP.apply(*call, *inputs)
    return out_RH


def _call_operator(
    inputs: Sequence[Any], expert_ids_RK: Tensor, counts_L: list[int] | None, settings: Settings
) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = torch.ops.hf_moe_ep.expert_mlp(
        *inputs, expert_ids_RK, counts_L, *settings.arguments()
    )
    return outputs


def _cast_masters(tensors: Sequence[Any], masters: Masters | None) -> tuple[Any, ...]:
    """Replace the master weights among the inputs by cast copies."""
    if masters is None:
        return tuple(tensors)
    named = zip(INPUT_NAMES, tensors, strict=False)
    cast = [masters.cast(name, x) if name in ("up", "down") else x for name, x in named]
    return *cast, *tensors[len(cast) :]


def postpone_grads(experts: ExpertWeights) -> ExpertWeights:
    """Return the same weights for one `expert_mlp` call that computes their gradients later.

    This function creates an autograd node whose backward computes the gradients. Among the nodes
    that are ready, autograd runs the node that was created last. If the forward makes its calls in
    this order, the gradients of the weights are computed while gradients of rows are being sent:

        forward    send rows, postpone_grads, receive rows, expert_mlp
        backward   expert_mlp, receive (starts to send gradients), weight gradients, send (waits)

    For another chunk of rows, pass the returned weights to `postpone_grads` again. The gradients of
    all chunks are added up in fp32 or wider and rounded once, so they are as exact as the gradients
    of a single chunk.
    """
    tensors = experts.named_tensors()
    if not _need_grad(tensors.values()):
        return experts
    previous, masters = experts.postponed, experts.masters
    is_first = previous is None
    postponed = PostponedGrads() if previous is None else previous.for_next_chunk()
    outputs = _Postpone.apply(postponed, masters, is_first, tuple(tensors), *tensors.values())
    # `dataclasses.replace` does the same, and takes the host three times as long.
    named = experts.__dict__ | dict(zip(tensors, outputs, strict=True))
    return ExpertWeights(**named | {"postponed": postponed})


def _need_grad(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Postpone(torch.autograd.Function):
    """The identity function, whose backward computes gradients by calling `postponed.finish`.

    The nodes of several chunks form a chain, so backward reaches the node of the first chunk last.
    Only that node returns gradients, summed over all chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        postponed: PostponedGrads,
        masters: Masters | None,
        is_first: bool,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.postponed = postponed
        ctx.masters = masters
        ctx.is_first = is_first
        ctx.names = names
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        _, _, _, _, *needs = ctx.needs_input_grad
        mark_without_grad(ctx, outputs, tuple(needs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        postponed = ctx.postponed
        # The attribute is cleared, so that the tensors to which `finish` refers are freed.
        finish, postponed.finish = postponed.finish, None
        # If the first chunk finds no sums, no other chunk has added gradients. Those of the first
        # chunk are then computed in their own dtypes, because nothing is added to them.
        grads = postponed.sums if postponed.sums or not ctx.is_first else ExpertGrads()
        if finish is not None:
            with hidden_from_function_modes():
                finish(grads)
        grad_by_name = grads.take() if ctx.is_first else {}
        if ctx.is_first and ctx.masters is not None:
            ctx.masters.forget()
        return (None, None, None, None, *(grad_by_name.get(name) for name in ctx.names))


class _PostponingExpertMLP(torch.autograd.Function):
    """The operator with a backward that sets `postponed.finish`.

    Backward computes only the gradients of rows and routing weights. `finish` computes the
    gradients of the experts' tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        postponed: PostponedGrads,
        masters: Masters | None,
        settings: Settings,
        expert_ids_RK: Tensor,
        counts_L: list[int] | None,
        *inputs: Any,
    ) -> tuple[Tensor, ...]:
        call = (_cast_masters(inputs, masters), expert_ids_RK, counts_L, settings)
        if torch.compiler.is_compiling() or operators_are_observed():
            output, ctx.implementation = _call_operator(*call), None
        else:
            with hidden_from_function_modes():
                output, ctx.implementation = run_forward(*call)
        save_for_backward(ctx, inputs, output, settings)
        ctx.postponed, ctx.masters = postponed, masters
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        no_grads = (None,) * len(ctx.needs_input_grad)
        if grad_RH is None:
            return no_grads
        needs = ctx.needs_input_grad[-len(INPUT_NAMES) :]
        _, _, *experts_need = needs
        saved = ctx.saved_tensors
        with hidden_from_function_modes():
            grads, finish = run_backward(
                grad_RH,
                _cast_masters(saved, ctx.masters),
                needs,
                ctx.settings,
                postpone=True,
                in_chunks=ctx.postponed.in_chunks and any(experts_need),
                implementation=ctx.implementation,
            )
        if any(experts_need):
            ctx.postponed.finish = finish
        elif ctx.masters is not None:  # frozen experts, which have no `_Postpone`
            ctx.masters.forget()
        # `_Postpone` gets placeholders, because `finish` computes the gradients.
        placeholders = [
            make_placeholder_grad(tensor, tensor.shape) if need else None
            for tensor, need in zip(saved[2 : len(needs)], experts_need, strict=True)
        ]
        computed = (grads.get("rows"), grads.get("weights"))
        return (*no_grads[: -len(needs)], *computed, *placeholders)
