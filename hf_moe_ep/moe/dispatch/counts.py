"""Exchange the counts of rows before the rows are exchanged.

Once per MoE layer, the ranks of an ep group send each other one small vector by all-to-all: a
header (forward number, layer, mode), followed by the counts that the receiving rank needs. If ranks
are at different positions (another layer, mode or step), every rank raises an error. Without this
check a rank would receive tokens of another layer, or wait forever.

The device compares the headers and adds up the counts of all ranks. The host waits once, in
`CountsExchange.read`, which copies short vectors: the number of rows that this rank will receive
from each rank, and the sums for its own experts (not for the experts of other ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.ranks.collectives import Transfer, start_counts


@dataclass(frozen=True)
class CountsExchange:
    """A running exchange of headers and counts between all ranks of a group.

    Attributes:
        fields: the fields of this rank's header, on the device.
        max_rows: the largest number of rows that a rank may receive; None for no limit. With a
            limit, every rank sends all ranks a second vector after its counts: the number of rows
            that it will send to each rank.
    """

    transfer: Transfer
    group: dist.ProcessGroup
    header: Header
    fields: Tensor
    max_rows: int | None

    def read(self, summarise: Callable[[Tensor], Sequence[Tensor]]) -> list[list[int]]:
        """Wait for the counts of all ranks, and return the integers that `summarise` computes.

        `summarise` gets [D, X], whose line r has the counts that rank r has sent to this rank. It
        returns vectors on the same device.

        Raises:
            RuntimeError: on every rank, if the headers of the ranks differ, or if a rank would
                receive more than `max_rows` rows.
        """
        received_DX = self.transfer.wait()
        num_ranks, num_fields = len(received_DX), len(self.fields)
        headers, counts_DX = received_DX[:, :num_fields], received_DX[:, num_fields:]
        vectors = [(headers != self.fields).any().view(1)]
        if self.max_rows is not None:
            counts_DX, rows_DD = counts_DX.tensor_split([-num_ranks], dim=1)
            vectors.append(rows_DD.sum(0))
        vectors += summarise(counts_DX)
        numbers = iter(self.transfer.read(torch.cat(vectors)))
        (differ,), *values = [list(islice(numbers, len(vector))) for vector in vectors]
        if differ:
            raise self._make_header_error(self.transfer.read(headers))
        if self.max_rows is not None:
            check_max_rows(values.pop(0), self.max_rows, self.group, self.header)
        return values

    def _make_header_error(self, headers: list[list[Any]]) -> RuntimeError:
        ranks = dist.get_process_group_ranks(self.group)
        lines = [
            f"  rank {rank}: {Header(*fields)}" for rank, fields in zip(ranks, headers, strict=True)
        ]
        return RuntimeError(
            "ranks of one ep group are at different places of the model:\n"
            + "\n".join(lines)
            + "\nEvery rank must run the same forwards in the same order and mode; look for a "
            "branch, a skipped batch or a model.eval() that depends on the rank."
        )


def exchange_counts(
    counts: Sequence[Tensor],
    rows_D: Sequence[Tensor],
    group: dist.ProcessGroup,
    header: Header,
    max_rows: int | None,
) -> CountsExchange:
    """Start to send counts to every rank of `group`, after this rank's header.

    `counts` are int64 tables, whose line r is sent to rank r. `rows_D` has one vector for each
    chunk of tokens: the number of rows that this rank will send to each rank.
    """
    device, num_ranks = counts[0].device, len(counts[0])
    # Pin the memory, because a copy from pageable memory is a host sync. The device is the CPU even
    # if torch.set_default_device names another one, whose memory cannot be pinned.
    numbers = torch.tensor(header.as_list(), device="cpu", pin_memory=device.type == "cuda")
    fields = numbers.to(device, non_blocking=True)
    columns = [fields.expand(num_ranks, -1), *counts]
    if max_rows is not None:
        columns.append(sum(rows_D[1:], start=rows_D[0]).expand(num_ranks, -1))
    transfer = start_counts(torch.cat(columns, dim=1), group, where=header)
    return CountsExchange(transfer, group, header, fields, max_rows)


def check_max_rows(rows: list[int], max_rows: int, group: dist.ProcessGroup, where: object) -> None:
    """Raise RuntimeError if a rank of the group would receive more than `max_rows` rows.

    `rows` has the number of rows that each rank receives in one layer. Every rank knows all these
    numbers, so all ranks raise the error before they allocate memory for the rows.
    """
    if max(rows) > max_rows:
        ranks = dist.get_process_group_ranks(group)
        worst = rows.index(max(rows))
        raise RuntimeError(
            f"{where}: rank {ranks[worst]} would get {rows[worst]} rows, more than "
            f"max_tokens_per_rank={max_rows} (rows by rank: "
            + ", ".join(f"{rank}: {count}" for rank, count in zip(ranks, rows, strict=True))
            + "). The router sends too many tokens to this rank's experts: raise "
            "max_tokens_per_rank, lower the batch size, or add the router's load-balancing loss"
        )
