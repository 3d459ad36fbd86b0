"""What an own training loop asks: how many tokens count, and which batch a rank is to be given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.models import IGNORED_LABEL


def global_token_count(model: nn.Module, labels: Tensor | Iterable[Tensor]) -> Tensor:
    """Count the tokens that the causal loss counts, over all ranks (an int64 scalar).

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
    """Count the ranks that are to be given different batches: all of them, or one per sp group."""
    meshes = _meshes(model)
    return 1 if meshes is None else meshes.data_parallel_size


def data_parallel_rank(model: nn.Module) -> int:
    """Return which of `data_parallel_size(model)` batches this rank is to be given."""
    meshes = _meshes(model)
    return 0 if meshes is None else dist.get_rank() // meshes.sp_size


def _meshes(model: nn.Module) -> Meshes | None:
    state = find_state(model)
    return None if state is None else state.meshes
