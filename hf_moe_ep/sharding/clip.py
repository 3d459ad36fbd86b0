"""Gradients over dense and expert meshes: their norm, and clipping.

`torch.nn.utils.clip_grad_norm_` stacks the norms of all parameters and raises because experts and
the rest live on different meshes. Here each rank adds up its own elements per kind of placement,
one all-reduce per kind completes the sum, and the few sums of kinds are combined on every rank
alike: no norm is ever gathered per parameter.

    kind           all-reduced over
    dense          fsdp
    experts, ep 1  ep_fsdp
    experts        ep_fsdp and ep, as one group; in turn where torch cannot make it (`mesh.py`)

An element that a mesh axis replicates (HSDP) is counted once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.ranks.collectives import max_over_ranks, sum_over_ranks
from hf_moe_ep.ranks.mesh import EP, EP_FSDP, Meshes
from hf_moe_ep.state import find_state


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients of `model` so that their joint norm is at most `max_norm`.

    Args:
        model: sharded or not; every rank calls this.
        max_norm: as in `torch.nn.utils.clip_grad_norm_`.
        norm_type: p of the p-norm, or `inf`.
        error_if_nonfinite: raise RuntimeError on every rank if the norm is nan or inf.

    Raises:
        ValueError: not a model, or a `norm_type` that is no norm.

    Returns the norm before clipping, the same number on every rank.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"clip_grad_norm_ takes the model, got {type(model).__name__}; write "
            f"clip_grad_norm_(model, {max_norm}), without .parameters()"
        )
    state = find_state(model)
    meshes = None if state is None else state.meshes
    return clip_gradients_of(
        model.parameters(), max_norm, norm_type, meshes, error_if_nonfinite=error_if_nonfinite
    )


@torch.no_grad()
def clip_gradients_of(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    meshes: Meshes | None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of some parameters of a model, as `clip_grad_norm_` does those of all.

    `meshes` are those of the model; with None the norm of experts takes one all-reduce per axis of
    their mesh.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a number > 0 or inf, got {norm_type}; try 2.0")
    grads = [p.grad for p in parameters if p.grad is not None]
    total = _total_norm(grads, float(norm_type), meshes)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the gradient norm (p={norm_type}) is {total.item()}, so it cannot be clipped to "
            f"{max_norm}; set error_if_nonfinite=False to clip anyway"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device, local.dtype))
    return total


def _total_norm(grads: list[Tensor], norm_type: float, meshes: Meshes | None) -> Tensor:
    kinds: dict[object, list[Tensor]] = {}
    for grad in grads:
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault(kind, []).append(grad)
    parts = [_power_sum(members, norm_type, meshes) for members in kinds.values()]
    if not parts:
        return torch.tensor(0.0)
    wide = torch.stack([part.to(parts[0].device) for part in parts])
    return wide.amax() if norm_type == float("inf") else wide.sum() ** (1.0 / norm_type)


def _power_sum(grads: list[Tensor], norm_type: float, meshes: Meshes | None) -> Tensor:
    """sum |g|^p (p = inf: max |g|) of gradients that share one mesh and one placement."""
    total = _own_power_sum(grads, norm_type)
    like = grads[0]
    if not isinstance(like, DTensor):
        return total
    # With CPU offload gradients lie on the host, where NCCL cannot reduce.
    total = total.to(like.device_mesh.device_type)
    reduce_over = max_over_ranks if norm_type == float("inf") else sum_over_ranks
    for group in _groups(like, meshes):
        total = reduce_over(total, group)
    return total


def _own_power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    """Add up the same over the elements that this rank holds."""
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    wide = functools.reduce(torch.promote_types, (g.dtype for g in locals_), torch.float32)
    norms = [
        torch.linalg.vector_norm(local, norm_type, dtype=wide)
        for local in locals_
        if local.numel() > 0
    ]
    if not norms:
        return torch.zeros((), dtype=wide, device=locals_[0].device)
    stacked = torch.stack(norms)
    return stacked.amax() if norm_type == float("inf") else (stacked**norm_type).sum()


def _groups(like: DTensor, meshes: Meshes | None) -> list[dist.ProcessGroup]:
    """Find the groups over which each element of a tensor that lies as `like` does is held once."""
    mesh = like.device_mesh
    axes = [i for i, placement in enumerate(like.placements) if not placement.is_replicate()]
    names = [(mesh.mesh_dim_names or ())[axis] for axis in axes]
    if meshes is not None and meshes.experts is not None and names == [EP_FSDP, EP]:
        return [meshes.experts.get_group()]
    return [mesh.get_group(axis) for axis in axes]
