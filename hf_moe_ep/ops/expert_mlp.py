"""down(f(gate(x)) * up(x)) for every (row, expert) pair, weighted and summed per row.

Rows are sorted by expert once, so each expert is one matrix product over consecutive pairs. With
two experts, top-2 and row 1 going to expert 0 only (L = 2 means "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   ->   pairs by expert: 0: rows 0, 1    1: row 0

Saved for backward: the rows, the pre-activations of each pair and the routing (with `recompute`
the rows and the routing). The activation is recomputed, and the routing weights' gradient needs
no expert output: with `out += w (down @ a)` it is `<grad, down @ a> = <down^T grad, a>`, whose
left factor the backward computes anyway (SonicMoE, arXiv 2512.14080, section 4).

Two implementations, `torch_mlp` and `triton_mlp`, stand behind one pair of operators (`operators`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import mark_without_grad, nothing
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights, LateGrads
from hf_moe_ep.ops.operators import run_backward, save
from hf_moe_ep.ops.spec import ExpertSpec


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
        rows_RH: in the dtype of the experts' weights; one to dequantise to where those are bytes.
        expert_ids_RK: int64, 0..L-1, or L for "no expert here"; a row names an expert at most
            once.
        weights_RK: fp32 or the dtype of the rows.
        counts_L: pairs per expert, if the host knows them. None where every id names an expert:
            R * K pairs.
        grad_scale: multiplies the gradients of the experts' own tensors, and nothing else.
        recompute: compute the pre-activations again in backward instead of keeping them.
        backend: "torch", or for tensors that `triton_mlp.covers` "triton" or "auto": the latter
            takes torch, with a warning, where the kernels cannot be built or do not fit.
    """
    named = experts.named_tensors()
    tensors = list(named.values())
    inputs = {"rows": rows_RH, "weights": weights_RK, **named}
    trained = [name for name, tensor in inputs.items() if tensor.requires_grad]
    wanted = bool(trained) and torch.is_grad_enabled()
    spec = ExpertSpec(
        formula,
        tuple(named),
        up_scale=experts.up_scale,
        down_scale=experts.down_scale,
        grad_scale=grad_scale,
        keep_pre=wanted and not recompute,
        trained=tuple(trained) if wanted else (),
        backend=backend,
        quantised=experts.quantised,
    ).to_text()
    if experts.late is None:
        out_RH, *_ = torch.ops.hf_moe_ep.expert_mlp(
            rows_RH, weights_RK, tensors, expert_ids_RK, counts_L, spec
        )
    else:
        out_RH, *_ = _RowsFirst.apply(
            experts.late, expert_ids_RK, counts_L, spec, rows_RH, weights_RK, *tensors
        )
    return out_RH


def postpone_grads(experts: ExpertWeights) -> ExpertWeights:
    """The same weights for one `expert_mlp`, their gradients left to a node that is made here.

    Of the nodes that are ready, autograd runs the one made last. Called between two functions that
    send rows away and take them in, it puts the weights' gradients between their backwards: while
    the rows' gradients travel.

    What this returned is handed in again for another chunk of rows. The gradients of all chunks are
    added up in fp32 or wider and rounded once: no less exact than those of one chunk.
    """
    tensors = experts.named_tensors()
    wanted = any(tensor.requires_grad for tensor in tensors.values())
    if not (wanted and torch.is_grad_enabled()):
        return experts
    earlier = experts.late
    late = LateGrads() if earlier is None else LateGrads(earlier.sums)
    postponed = _Postpone.apply(late, earlier is None, tuple(tensors), *tensors.values())
    return replace(experts, late=late, **dict(zip(tensors, postponed, strict=True)))


class _Postpone(torch.autograd.Function):
    """The identity, in whose backward the gradients come from `late` instead of the edges.

    Those of several chunks stand behind each other, so the first of them runs last: it hands on the
    gradients of all.
    """

    @staticmethod
    def forward(
        ctx: Any, late: LateGrads, first: bool, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.late = late
        ctx.first = first
        ctx.names = names
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        _, _, _, *needs = ctx.needs_input_grad
        mark_without_grad(ctx, outputs, tuple(needs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        late = ctx.late
        # What `finish` holds on to is freed with it.
        finish, late.finish = late.finish, None
        # The gradients of a single chunk need no sum.
        grads = late.sums if late.sums or not ctx.first else ExpertGrads()
        if finish is not None:
            finish(grads)
        found = grads.take() if ctx.first else {}
        return (None, None, None, *(found.get(name) for name in ctx.names))


class _RowsFirst(torch.autograd.Function):
    """The operator, in whose backward the gradients of the experts are left for later."""

    @staticmethod
    def forward(
        ctx: Any,
        late: LateGrads,
        expert_ids_RK: Tensor,
        counts_L: list[int] | None,
        spec: str,
        rows_RH: Tensor,
        weights_RK: Tensor,
        *experts: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs = (rows_RH, weights_RK, list(experts), expert_ids_RK, counts_L, spec)
        output = torch.ops.hf_moe_ep.expert_mlp(*inputs)
        save(ctx, inputs, output)
        ctx.late = late
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_RH is None:
            return (None,) * len(ctx.needs_input_grad)
        _, _, _, _, *needs = ctx.needs_input_grad
        saved = ctx.saved_tensors
        grads, ctx.late.finish = run_backward(grad_RH, saved, ctx.spec, needs, later=True)
        _, _, *experts = saved[: len(needs)]
        _, _, *need_experts = needs
        late = [
            nothing(tensor, tensor.shape) if need else None
            for tensor, need in zip(experts, need_experts, strict=True)
        ]
        return (None, None, None, None, grads.rows, grads.weights, *late)
