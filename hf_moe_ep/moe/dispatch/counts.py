"""What ranks tell each other before rows travel: where they are, and how much they will send.

Each rank of an ep group sends one small vector to all others, once per MoE layer: a header (forward
number, layer, mode), then its counts. Ranks that are not in the same place of the same step get an
error, each on every rank, instead of each other's tokens or a hang.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks.collectives import gather_counts


@dataclass(frozen=True)
class Header:
    """Where a rank is, and what it sends; equal on all ranks of an ep group."""

    forward: int
    layer: int
    training: bool
    grad: bool
    checkpointed: bool
    recompute: bool
    top_k: int
    itemsize: int

    def as_list(self) -> list[int]:
        return [int(getattr(self, field.name)) for field in fields(self)]

    @staticmethod
    def describe(values: list[int]) -> str:
        forward, layer, training, grad, checkpointed, recompute, top_k, itemsize = values
        mode = ["training" if training else "evaluation"]
        mode += [] if grad else ["no_grad"]
        mode += ["checkpointed"] if checkpointed else []
        mode += ["recompute"] if recompute else []
        sizes = f"top-{top_k}, {itemsize} bytes per element"
        return f"MoE layer {layer} of forward {forward} ({', '.join(mode)}; {sizes})"


def exchange_counts(counts: Tensor, group: dist.ProcessGroup, header: Header) -> list[list[int]]:
    """`counts` of every rank; raises on all of them where one is at another place."""
    mine = header.as_list()
    where = Header.describe(mine)
    # Pinned, because a copy from pageable memory would make the host wait for the GPU once more.
    place = torch.tensor(mine, dtype=counts.dtype, pin_memory=counts.is_cuda)
    vector = torch.cat([place.to(counts.device, non_blocking=True), counts])
    gathered = gather_counts(vector, group, where=where)
    told = [row[: len(mine)] for row in gathered]
    if any(place != mine for place in told):
        ranks = dist.get_process_group_ranks(group)
        lines = [
            f"  rank {rank}: {Header.describe(place)}"
            for rank, place in zip(ranks, told, strict=True)
        ]
        raise RuntimeError(
            "ranks of one ep group are at different places of the model:\n"
            + "\n".join(lines)
            + "\nEvery rank must run the same forwards in the same order and mode; look for a "
            "branch, a skipped batch or a model.eval() that depends on the rank."
        )
    return [row[len(mine) :] for row in gathered]


def check_max_rows(
    tables: list[list[list[int]]], max_rows: int, group: dist.ProcessGroup, where: str
) -> None:
    """`tables[chunk][rank]` starts with rows per destination; every rank knows what every rank
    gets, so all raise together and before allocating.
    """
    ranks = dist.get_process_group_ranks(group)
    rows = [sum(row[i] for table in tables for row in table) for i in range(len(ranks))]
    if max(rows) > max_rows:
        worst = rows.index(max(rows))
        raise RuntimeError(
            f"{where}: rank {ranks[worst]} would get {rows[worst]} rows, more than "
            f"max_tokens_per_rank={max_rows} (rows by rank: "
            + ", ".join(f"{rank}: {count}" for rank, count in zip(ranks, rows, strict=True))
            + "). The router sends too many tokens to this rank's experts: raise "
            "max_tokens_per_rank, lower the batch size, or add the router's load-balancing loss"
        )
