"""What ranks tell each other before rows travel: where they are, and how much they will send.

Each rank of an ep group sends one small vector to all others, once per MoE layer: a header (forward
number, layer, mode), then its counts. Ranks that are not in the same place of the same step get an
error, each on every rank, instead of each other's tokens or a hang.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.ranks.collectives import Gathering, start_gathering


class CountsUnderWay:
    """Headers and counts of all ranks of a group, on their way."""

    def __init__(self, gathering: Gathering, group: dist.ProcessGroup, header: Header) -> None:
        self._gathering, self._group, self._header = gathering, group, header

    def wait(self) -> list[list[int]]:
        """Wait for the counts of every rank; raise on all of them where one is elsewhere."""
        mine = self._header.as_list()
        gathered = self._gathering.wait()
        told = [row[: len(mine)] for row in gathered]
        if any(place != mine for place in told):
            ranks = dist.get_process_group_ranks(self._group)
            headers = [Header.from_list(place) for place in told]
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


def start_counts(counts: Tensor, group: dist.ProcessGroup, header: Header) -> CountsUnderWay:
    """Send this rank's place and `counts` to every rank of `group`."""
    # Pinned, because a copy from pageable memory would make the host wait for the GPU once more.
    place = torch.tensor(header.as_list(), dtype=counts.dtype, pin_memory=counts.is_cuda)
    vector = torch.cat([place.to(counts.device, non_blocking=True), counts])
    return CountsUnderWay(start_gathering(vector, group, where=str(header)), group, header)


def check_max_rows(rows: list[int], max_rows: int, group: dist.ProcessGroup, where: str) -> None:
    """Raise where a rank of the group would get more than `max_rows` rows.

    `rows` are those that each rank gets in one layer. Every rank knows them all, so all raise
    together and before they allocate.
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
