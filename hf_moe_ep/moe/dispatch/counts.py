"""The exchange of counts that precedes the exchange of rows.

Each rank of an ep group sends one small vector to all others, once per MoE layer: a header (forward
number, layer, mode), then the numbers of rows that it will send. If ranks are at different
positions (another layer, mode or step), every rank raises an error, instead of receiving tokens of
another layer or waiting forever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.ranks.collectives import Gathering, start_gathering


class CountsExchange:
    """A running exchange of headers and counts between all ranks of a group."""

    def __init__(self, gathering: Gathering, group: dist.ProcessGroup, header: Header) -> None:
        self._gathering, self._group, self._header = gathering, group, header

    def wait(self) -> list[list[int]]:
        """Wait for the counts of every rank.

        Raises:
            RuntimeError: on every rank, if the headers of the ranks differ.
        """
        mine = self._header.as_list()
        gathered = self._gathering.wait()
        numbers: list[list[Any]] = [row[: len(mine)] for row in gathered]
        if any(header != mine for header in numbers):
            ranks = dist.get_process_group_ranks(self._group)
            headers = [Header(*header) for header in numbers]
            lines = [
                f"  rank {rank}: {header}" for rank, header in zip(ranks, headers, strict=True)
            ]
            raise RuntimeError(
                "ranks of one ep group are at different places of the model:\n"
                + "\n".join(lines)
                + "\nEvery rank must run the same forwards in the same order and mode; look for a "
                "branch, a skipped batch or a model.eval() that depends on the rank."
            )
        return [row[len(mine) :] for row in gathered]


def start_counts(counts: Tensor, group: dist.ProcessGroup, header: Header) -> CountsExchange:
    """Send this rank's header and `counts` to every rank of `group`."""
    # Pinned, because a copy from pageable memory is a host sync.
    mine = torch.tensor(header.as_list(), dtype=counts.dtype, pin_memory=counts.is_cuda)
    vector = torch.cat([mine.to(counts.device, non_blocking=True), counts])
    return CountsExchange(start_gathering(vector, group, where=str(header)), group, header)


def check_max_rows(rows: list[int], max_rows: int, group: dist.ProcessGroup, where: str) -> None:
    """Raise RuntimeError if a rank of the group would receive more than `max_rows` rows.

    `rows` has the number of rows that each rank receives in one layer. Every rank knows all of
    these numbers, so all ranks raise together, before they allocate memory for the rows.
    """
    ranks = dist.get_process_group_ranks(group)
    if max(rows) > max_rows:
        worst = rows.index(max(rows))
        raise RuntimeError(
            f"{where}: rank {ranks[worst]} would get {rows[worst]} rows, more than "
            f"max_tokens_per_rank={max_rows} (rows by rank: "
            + ", ".join(f"{rank}: {count}" for rank, count in zip(ranks, rows, strict=True))
            + "). The router sends too many tokens to this rank's experts: raise "
            "max_tokens_per_rank, lower the batch size, or add the router's load-balancing loss"
        )
