"""Clip the gradients of a model whose experts and other parameters are on different meshes.

`torch.nn.utils.clip_grad_norm_` stacks the norms of all parameters, which fails for DTensors on
different meshes. `clip_grad_norm_` in this file groups the gradients by mesh and placements
instead. For each group of gradients, a rank sums |g|^p over its own shards, and the sums of all
ranks are all-reduced over the mesh axes (`ranks/mesh.py`) along which the gradients are sharded.
Every rank then computes the same total norm from the sums of all groups:

    gradients           the sum is all-reduced over
    dense               fsdp
    experts, ep_size 1  ep_fsdp
    experts             ep_fsdp, ep and etp as one process group; if torch cannot create this group,
                        one axis after the other
    adapters that each  ep_fsdp, then ep
    etp rank holds

An element with replicas on several ranks (HSDP) is counted once. With pipeline stages, the sums are
all-reduced over the stages at the end, without the last stage's copy of a tied embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from hf_moe_ep.ranks.collectives import max_over_ranks, sum_over_ranks
from hf_moe_ep.ranks.mesh import Meshes, Stages
from hf_moe_ep.sharding.gathered import check_backward_has_ended
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.norms import choose_norm_dtype, compute_vector_norms


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients of `model` so that their joint norm is at most `max_norm`.

    Args:
        model: a model, sharded or not. Every rank must call this function.
        max_norm: the largest joint norm after clipping.
        norm_type: p of the p-norm, or `inf`; also as a string, such as "inf".
        error_if_nonfinite: raise RuntimeError on every rank if the norm is nan or inf.

    Returns:
        The norm before clipping: a plain scalar tensor, the same number on every rank.

    Raises:
        ValueError: `model` is not a module, `norm_type` is not a positive number, or the last
            backward raised an error.
        RuntimeError: the norm is nan or inf and `error_if_nonfinite` is set.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"clip_grad_norm_ takes the model, got {type(model).__name__}; write "
            f"clip_grad_norm_(model, {max_norm}), without .parameters()"
        )
    reshard(model)
    check_backward_has_ended(model)
    return clip_gradients_of(
        model.parameters(),
        max_norm,
        norm_type,
        Scope.of(model),
        error_if_nonfinite=error_if_nonfinite,
    )


@dataclass(frozen=True)
class Scope:
    """The ranks over which the gradients of a model are summed.

    Attributes:
        meshes: the meshes of the model. If it is None, the norm of the experts takes one all-reduce
            for each axis of their mesh.
        stages: the pipeline stages of the model, or None.
        copied_weight: on the last stage, the copy of a tied embedding, which is not counted,
            because the first stage counts the embedding; otherwise None.
    """

    meshes: Meshes | None = None
    stages: Stages | None = None
    copied_weight: Tensor | None = None

    @staticmethod
    def of(model: nn.Module) -> Scope:
        state = find_state(model)
        if state is None or state.meshes is None:
            return Scope()
        copied_weight = None if state.stage is None else state.stage.copied_weight
        return Scope(state.meshes, state.meshes.stages, copied_weight)


@torch.no_grad()
def clip_gradients_of(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float | str,
    scope: Scope,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of `parameters`; `clip_grad_norm_` describes the other arguments."""
    power = _parse_power(norm_type)
    by_layout: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            by_layout.setdefault(layout, []).append(parameter)
    total = _compute_total_norm(list(by_layout.values()), power, scope)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient norm (p={norm_type}) is {total.item()}, so it cannot be clipped to "
            f"{max_norm}; set error_if_nonfinite=False to clip anyway"
        )
    for same_layout in by_layout.values():
        clip_grads_with_norm_(same_layout, max_norm, total)
    return total


def _parse_power(norm_type: float | str) -> float:
    """Return p of the p-norm as a number; torch takes "inf" as a string, too."""
    try:
        power = float(norm_type)
    except ValueError:
        power = math.nan
    if not power > 0:
        raise ValueError(f"norm_type must be a number > 0 or inf, got {norm_type!r}; try 2.0")
    return power


def _compute_total_norm(by_layout: list[list[Tensor]], power: float, scope: Scope) -> Tensor:
    """Return the p-norm of all gradients, where p is `power`.

    The parameters of one list have the same mesh and the same placements.
    """
    counted = ([p for p in parameters if p is not scope.copied_weight] for parameters in by_layout)
    sums = [_sum_powers(same, power, scope.meshes) for same in counted if same]
    if not sums and scope.stages is None:
        return torch.tensor(0.0)
    is_max = power == float("inf")
    device = None if scope.meshes is None else scope.meshes.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if sums:
        stacked = torch.stack([x.to(sums[0].device) for x in sums])
        total = stacked.amax() if is_max else stacked.sum()
    if scope.stages is not None:
        # Stages may have gradients of several dtypes, or none.
        reduce_over = max_over_ranks if is_max else sum_over_ranks
        total = reduce_over(total.double(), scope.stages.column.get_group()).to(total.dtype)
    return total if is_max else total ** (1.0 / power)


def _sum_powers(parameters: list[Tensor], power: float, meshes: Meshes | None) -> Tensor:
    """Return sum |g|^p (max |g| if p is inf) over the elements of all `parameters`' gradients.

    The gradients have the same mesh and the same placements.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norms = compute_vector_norms([shard for shard in shards if shard.numel() > 0], power)
    if not norms:
        total = torch.zeros((), dtype=choose_norm_dtype(shards), device=shards[0].device)
    elif power == float("inf"):
        total = torch.stack(norms).amax()
    else:
        total = (torch.stack(norms) ** power).sum()
    example = grads[0]
    if not isinstance(example, DTensor):
        return total
    # With CPU offload the gradients are in host memory, which NCCL cannot all-reduce.
    total = total.to(example.device_mesh.device_type)
    reduce_over = max_over_ranks if power == float("inf") else sum_over_ranks
    for group in _find_reduction_groups(example, meshes):
        total = reduce_over(total, group)
    return total


def _find_reduction_groups(grad: DTensor, meshes: Meshes | None) -> list[dist.ProcessGroup]:
    """Return the process groups whose ranks together hold each element of `grad` exactly once."""
    mesh = grad.device_mesh
    axes = [i for i, placement in enumerate(grad.placements) if not placement.is_replicate()]
    if meshes is not None and meshes.experts is not None and len(axes) > 1:
        # Only tensors of experts have several sharded axes. A missing axis has one rank.
        is_one_copy = math.prod(mesh.size(axis) for axis in axes) == meshes.experts.size()
        if is_one_copy:
            return [meshes.experts.get_group()]
    return [mesh.get_group(axis) for axis in axes]
