"""Gradients over dense and expert meshes: the norm, clipping, and the token count to divide by.

`torch.nn.utils.clip_grad_norm_` stacks the norms of all parameters and raises because experts and
the rest live on different meshes. Here each rank adds up its own elements per kind of placement,
one all-reduce per kind completes the sum, and the kinds are combined on the host side of the
tensor: no norm is ever gathered per parameter.

An element that a mesh axis replicates (HSDP) is counted once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.comm import max_over_ranks, sum_over_ranks
from hf_moe_ep.mesh import Meshes
from hf_moe_ep.state import find_state

IGNORED_LABEL = -100


@torch.no_grad()
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
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a number > 0 or inf, got {norm_type}; try 2.0")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = _total_norm(grads, float(norm_type))
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


def global_token_count(model: nn.Module, labels: Tensor | Iterable[Tensor]) -> Tensor:
    """Number of tokens that the causal loss counts, over all ranks (an int64 scalar).

    Args:
        model: the model that `labels` are for.
        labels: (B, S), not shifted, -100 where ignored; or the micro-batches of one step.

    Pass it as `num_items_in_batch` and multiply the loss by `data_parallel_size(model)`, because
    FSDP2 averages gradients: a loop that takes the mean per rank weighs the tokens of a short
    batch more than those of a long one.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    if not parts:
        raise ValueError("labels is empty: pass the labels of at least one micro-batch")
    counts = torch.stack([(part[..., 1:] != IGNORED_LABEL).sum() for part in parts])
    # Ranks of an sp group have the same labels.
    meshes = _meshes(model)
    return sum_over_ranks(counts.sum()) // (1 if meshes is None else meshes.sp_size)


def data_parallel_size(model: nn.Module) -> int:
    """How many ranks are to be given different batches: all of them, or one per sp group."""
    meshes = _meshes(model)
    return 1 if meshes is None else meshes.data_parallel_size


def data_parallel_rank(model: nn.Module) -> int:
    """Which of `data_parallel_size(model)` batches this rank is to be given."""
    meshes = _meshes(model)
    return 0 if meshes is None else dist.get_rank() // meshes.sp_size


def _meshes(model: nn.Module) -> Meshes | None:
    state = find_state(model)
    return None if state is None else state.meshes


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    kinds: dict[object, list[Tensor]] = {}
    for grad in grads:
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault(kind, []).append(grad)
    parts = [_power_sum(members, norm_type) for members in kinds.values()]
    if not parts:
        return torch.tensor(0.0)
    wide = torch.stack([part.to(parts[0].device) for part in parts])
    return wide.amax() if norm_type == float("inf") else wide.sum() ** (1.0 / norm_type)


def _power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    """sum |g|^p (p = inf: max |g|) of gradients that share one mesh and one placement."""
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    wide = functools.reduce(torch.promote_types, (g.dtype for g in locals_), torch.float32)
    norms = [
        torch.linalg.vector_norm(local, norm_type, dtype=wide)
        for local in locals_
        if local.numel() > 0
    ]
    infinite = norm_type == float("inf")
    if not norms:
        total = torch.zeros((), dtype=wide, device=locals_[0].device)
    else:
        stacked = torch.stack(norms)
        total = stacked.amax() if infinite else (stacked**norm_type).sum()
    if isinstance(grads[0], DTensor):
        mesh = grads[0].device_mesh
        # With CPU offload gradients lie on the host, where NCCL cannot reduce.
        total = total.to(mesh.device_type)
        for axis, placement in enumerate(grads[0].placements):
            if not placement.is_replicate():
                reduce_ = max_over_ranks if infinite else sum_over_ranks
                total = reduce_(total, mesh.get_group(axis))
    return total
