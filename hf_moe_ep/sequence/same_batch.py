"""Ranks of one sp group split one batch between them, so each has to be given the same.

A data loader that gave them different ones would train on sequences whose ends belong to other
beginnings. Sizes, names and a checksum of every tensor are compared at each forward.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.collectives import gather_counts


def check_same_batch(given: dict[str, Any], tokens: Tensor, group: dist.ProcessGroup) -> None:
    """Raise on every rank of the group where they were not given the same batch."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    names = zlib.crc32(
        "".join(f"{name}{tuple(tensors[name].shape)}" for name in sorted(tensors)).encode()
    )
    sums = sum(_checksum(tensors[name]) * place for place, name in enumerate(sorted(tensors), 1))
    assert isinstance(sums, Tensor)
    mine = torch.tensor([*tokens.shape[:2], names], device=tokens.device)
    told = gather_counts(torch.cat([mine, sums.view(1)]), group, where="the sp group's batches")
    if any(row != told[0] for row in told):
        ranks = dist.get_process_group_ranks(group)
        sizes = ", ".join(
            f"rank {rank}: {row[0]} x {row[1]}" for rank, row in zip(ranks, told, strict=True)
        )
        raise ValueError(
            f"ranks of one sp group were given different batches ({sizes}; or other contents): the "
            f"ranks {ranks} split one batch between them. In your own loop draw samples by "
            f"hf_moe_ep.data_parallel_rank(model) of hf_moe_ep.data_parallel_size(model); what is "
            f"random in a data set or collate function needs one seed for all of these ranks"
        )


def _checksum(x: Tensor) -> Tensor:
    """Return an int64 that differs between other batches; floats in another order may pass."""
    if x.is_floating_point():
        return x.detach().sum(dtype=torch.float64).view(torch.int64)
    places = torch.arange(1, x.numel() + 1, device=x.device)
    return (x.flatten() * places).sum()
