"""The exchange of counts that precedes the exchange of rows.

Once per MoE layer, the ranks of an ep group all-gather one small vector each: a header (forward
number, layer, mode), followed by the numbers of rows that the rank will send. If ranks are at
different positions (another layer, mode or step), every rank raises an error. Without this check
a rank would receive tokens of another layer, or wait forever.
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
        own_fields = self._header.as_list()
        vectors = self._gathering.wait()
        headers: list[list[Any]] = [vector[: len(own_fields)] for vector in vectors]
        if any(fields != own_fields for fields in headers):
            ranks = dist.get_process_group_ranks(self._group)
            lines = [
                f"  rank {rank}: {Header(*fields)}"
                for rank, fields in zip(ranks, headers, strict=True)
            ]
            raise RuntimeError(
                "ranks of one ep group are at different places of the model:\n"
                + "\n".join(lines)
                + "\nEvery rank must run the same forwards in the same order and mode; look for a "
                "branch, a skipped batch or a model.eval() that depends on the rank."
            )
        return [vector[len(own_fields) :] for vector in vectors]


def start_counts(counts: Tensor, group: dist.ProcessGroup, header: Header) -> CountsExchange:
    """Start to send this rank's header and `counts` to every rank of `group`."""
    # The memory is pinned, because a copy from pageable memory is a host sync.
    fields = torch.tensor(header.as_list(), dtype=counts.dtype, pin_memory=counts.is_cuda)
    vector = torch.cat([fields.to(counts.device, non_blocking=True), counts])
    return CountsExchange(start_gathering(vector, group, where=str(header)), group, header)


def check_max_rows(rows: list[int], max_rows: int, group: dist.ProcessGroup, where: str) -> None:
    """Raise RuntimeError if a rank of the group would receive more than `max_rows` rows.

    `rows` has the number of rows that each rank receives in one layer. Every rank knows all of
    these numbers, so all ranks raise the error, before they allocate memory for the rows.
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
