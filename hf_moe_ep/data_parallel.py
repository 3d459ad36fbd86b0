"""Count the tokens of a step, and find the batch of this rank, for your own training loop.

`global_token_count` counts the tokens of all ranks. `data_parallel_size` returns the number of
different batches per step, and `data_parallel_rank` returns the index of this rank's batch. With
sp_size or cp_size > 1, cp_size * sp_size consecutive ranks share a batch. With pp_size > 1, the
ranks that have the same position in their stages share a batch as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.models import IGNORED_LABEL


def global_token_count(model: nn.Module, labels: Tensor | Iterable[Tensor]) -> Tensor:
    """Count the tokens of all ranks that have a causal loss, as an int64 scalar.

        num_items = global_token_count(model, labels)
        loss = model(input_ids, labels=labels, num_items_in_batch=num_items).loss
        (loss * data_parallel_size(model)).backward()

    The factor is needed because FSDP2 averages gradients over ranks. If a loop used the mean loss
    of each rank instead, a token of a short batch would have more weight than a token of a long
    batch.

    Args:
        model: the model to which the labels are passed.
        labels: (B, S), not shifted, with -100 for tokens without loss; or a list of such tensors,
            one for each micro-batch of an optimizer step.

    Raises:
        ValueError: `labels` is an empty list.
    """
    micro_batches = [labels] if isinstance(labels, Tensor) else list(labels)
    if not micro_batches:
        raise ValueError("labels is empty: pass the labels of at least one micro-batch")
    counts = torch.stack([(batch[..., 1:] != IGNORED_LABEL).sum() for batch in micro_batches])
    # All ranks that share a batch have the same labels.
    meshes = _meshes(model)
    num_sharing = 1 if meshes is None else meshes.pp_size * meshes.ranks_per_batch
    total = counts.sum()
    if meshes is not None:  # the labels may still be on the host, where NCCL cannot sum
        total = total.to(meshes.device)
    return sum_over_ranks(total) // num_sharing


def data_parallel_size(model: nn.Module) -> int:
    """Return the number of different batches per step: ranks / (pp_size * cp_size * sp_size)."""
    meshes = _meshes(model)
    return 1 if meshes is None else meshes.data_parallel_size


def data_parallel_rank(model: nn.Module) -> int:
    """Return the index of this rank's batch, from 0 to `data_parallel_size(model) - 1`."""
    meshes = _meshes(model)
    return 0 if meshes is None else meshes.data_parallel_rank


def _meshes(model: nn.Module) -> Meshes | None:
    state = find_state(model)
    return None if state is None else state.meshes
