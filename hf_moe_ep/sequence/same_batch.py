"""Check that ranks that share a batch were given the same batch (sp_size or cp_size > 1).

Every rank of the group computes a slice of the batch. With different batches the model would train
on sequences that are joined from slices of several samples. `check_same_batch` runs in each forward
and compares the names, sizes and checksums of all tensors. `check_sizes` then compares the sizes of
labels and masks with the tokens. Stock code finds wrong sizes in whole sequences, but a slice of a
tensor that is too long may have the right size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.collectives import gather_counts

# The arguments with one entry per token, (B, S). An attention mask may also have four dims.
_PER_TOKEN = ("labels", "shift_labels", "attention_mask")


def check_same_batch(given: dict[str, Any], tokens: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank of `group` if the batches differ.

    Args:
        given: the arguments of the forward by name. All tensors in them are compared.
        tokens: token ids (B, S) or embeddings (B, S, H), for the sizes in the error.
    """
    numbers = compute_batch_numbers(given, tokens)
    by_rank = gather_counts(numbers, group, where="batches that ranks share")
    error = find_other_batch(by_rank, dist.get_process_group_ranks(group), "sp or cp group")
    if error is not None:
        raise error


def compute_batch_numbers(given: dict[str, Any], tokens: Tensor) -> Tensor:
    """Return four int64 numbers: rows, tokens per row, a checksum of names, and one of values."""
    tensors = _find_tensors(given)
    names = sorted(tensors)
    checksum_of_names = zlib.crc32(
        "".join(f"{name}{tuple(tensors[name].shape)}" for name in names).encode()
    )
    checksum = sum(
        _compute_checksum(tensors[name]) * factor for factor, name in enumerate(names, 1)
    )
    assert isinstance(checksum, Tensor)
    sizes_and_names = torch.tensor([*tokens.shape[:2], checksum_of_names], device=tokens.device)
    return torch.cat([sizes_and_names, checksum.view(1)])


def _find_tensors(given: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors among arguments, also those in dicts, for example masks by layer type."""
    tensors = {}
    for name, value in given.items():
        if isinstance(value, dict):
            tensors.update(_find_tensors(value, f"{prefix}{name}."))
        elif isinstance(value, Tensor):
            tensors[prefix + name] = value
    return tensors


def find_other_batch(
    by_rank: Sequence[Sequence[int]], ranks: list[int], sharing: str
) -> ValueError | None:
    """Return the error for ranks with different batches, or None if all batches are equal.

    Args:
        by_rank: the `compute_batch_numbers` of each of `ranks`, which share a batch.
        sharing: the kind of group, for the error.
    """
    if all(numbers == by_rank[0] for numbers in by_rank):
        return None
    sizes = ", ".join(
        f"rank {rank}: {rows} x {length}"
        for rank, (rows, length, *_) in zip(ranks, by_rank, strict=True)
    )
    return ValueError(
        f"ranks of one {sharing} were given different batches ({sizes}; if the sizes are "
        f"equal, the contents differ), but the ranks {ranks} split one batch. In your own loop "
        f"select samples by hf_moe_ep.data_parallel_rank(model) of "
        f"hf_moe_ep.data_parallel_size(model); random numbers in a data set or collate "
        f"function need the same seed on all of these ranks"
    )


def check_sizes(given: dict[str, Any], tokens: Tensor) -> None:
    """Raise ValueError if labels, or a mask with two dims, do not have one entry per token.

    `check_same_batch` has compared these arguments, so all ranks that share the batch raise the
    error.
    """
    rows, length = tokens.shape[:2]
    for name in _PER_TOKEN:
        value = given.get(name)
        if not isinstance(value, Tensor) or (name == "attention_mask" and value.ndim != 2):
            continue
        if value.shape != (rows, length):
            raise ValueError(
                f"{name} has the shape {tuple(value.shape)}, but the batch has {rows} rows of "
                f"{length} tokens; pass one entry per token, ({rows}, {length})"
            )


def _compute_checksum(x: Tensor) -> Tensor:
    """Return an int64 checksum of the values. It depends on their order only for integers."""
    if x.is_floating_point():
        return x.detach().sum(dtype=torch.float64).view(torch.int64)
    positions = torch.arange(1, x.numel() + 1, device=x.device)
    return (x.flatten() * positions).sum()
