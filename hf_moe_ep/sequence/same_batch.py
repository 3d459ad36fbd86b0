"""Check that all ranks of an sp group were given the same batch, of which each computes a slice.

With different batches the model would train on sequences joined from parts of several samples. Each
forward compares sizes, names and a checksum of every tensor.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.collectives import gather_counts


def check_same_batch(given: dict[str, Any], tokens: Tensor, group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` if the batches differ.

    Args:
        given: the arguments of the forward by name; all tensors among them are compared.
        tokens: token ids (B, S) or embeddings (B, S, H), for the sizes in the error.
    """
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    names = zlib.crc32(
        "".join(f"{name}{tuple(tensors[name].shape)}" for name in sorted(tensors)).encode()
    )
    sums = sum(_checksum(tensors[name]) * factor for factor, name in enumerate(sorted(tensors), 1))
    assert isinstance(sums, Tensor)
    mine = torch.tensor([*tokens.shape[:2], names], device=tokens.device)
    by_rank = gather_counts(torch.cat([mine, sums.view(1)]), group, where="the sp group's batches")
    if any(numbers != by_rank[0] for numbers in by_rank):
        ranks = dist.get_process_group_ranks(group)
        sizes = ", ".join(
            f"rank {rank}: {rows} x {length}"
            for rank, (rows, length, *_) in zip(ranks, by_rank, strict=True)
        )
        raise ValueError(
            f"ranks of one sp group were given different batches ({sizes}; equal sizes mean other "
            f"contents), but the ranks {ranks} split one batch. In your own loop select samples by "
            f"hf_moe_ep.data_parallel_rank(model) of hf_moe_ep.data_parallel_size(model); random "
            f"numbers in a data set or collate function need the same seed on all of these ranks"
        )


def _checksum(x: Tensor) -> Tensor:
    """Return an int64 checksum. It depends on the order of integers, but not of floats."""
    if x.is_floating_point():
        return x.detach().sum(dtype=torch.float64).view(torch.int64)
    positions = torch.arange(1, x.numel() + 1, device=x.device)
    return (x.flatten() * positions).sum()
