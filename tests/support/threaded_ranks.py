"""Ranks as threads of one process, with a network that counts bytes, for a dispatcher's own code.

    network = Network(4)
    results = network.run(function)          # function(rank) makes network.group(range(4), rank)

Whatever `all_to_all` and `hierarchical` ask of torch.distributed or of `ranks/collectives.py` is
answered here, so that dozens of layouts are tried in the time in which one group of processes
starts. As in a process group, the n-th exchange that a rank starts meets the n-th of the others.
Rows are handed over when the receiver waits, and not before: until then it would read NaN.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_moe_ep.dispatcher import Header
from hf_moe_ep.moe.dispatch import all_to_all, counts, hierarchical

# Seconds; a rank that waits longer waits for one that never comes.
PATIENCE = 60.0


class Network:
    """The queues between all pairs of threads, with a count of the bytes that went through them.

    Attributes:
        sent: bytes of rows by (sender, receiver, bytes of a row).
        gathered: how often a rank told counts.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.gathered: Counter[int] = Counter()
        self._started: Counter[Group] = Counter()
        self._post: dict[tuple[tuple[int, ...], int, int, int], Any] = {}
        self._changed = Condition()

    def group(self, ranks: Sequence[int], rank: int) -> "Group":
        return Group(self, tuple(ranks), rank)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` in a thread for each rank; the first error of a rank is raised."""
        with _on_threads(), ThreadPoolExecutor(self.world) as pool:
            running = [pool.submit(function, rank) for rank in range(self.world)]
            return [one.result() for one in running]

    def send(self, group: "Group", values: Sequence[Any]) -> int:
        """Send one value to each rank of a group; the number of this exchange."""
        with self._changed:
            self._started[group] += 1
            number = self._started[group]
            for receiver, value in zip(group.ranks, values, strict=True):
                self._post[group.ranks, number, group.rank, receiver] = value
            self._changed.notify_all()
        return number

    def take(self, group: "Group", number: int) -> list[Any]:
        """Return what every rank of a group sends to this rank in exchange number `number`."""
        keys = [(group.ranks, number, sender, group.rank) for sender in group.ranks]
        with self._changed:
            came = self._changed.wait_for(lambda: all(key in self._post for key in keys), PATIENCE)
            assert came, f"rank {group.rank} waits in vain for exchange {number} of {group.ranks}"
            return [self._post.pop(key) for key in keys]


@dataclass(frozen=True)
class Group:
    """Stand-in for a process group on one rank; `ranks` and `rank` count all threads."""

    network: Network
    ranks: tuple[int, ...]
    rank: int


class _Transfer:
    """Rows that arrive when the receiver waits."""

    def __init__(self, received_RX: Tensor, recv_counts: list[int], group: Group, n: int) -> None:
        self._parts = received_RX.fill_(float("nan")).split(recv_counts)
        self._group, self._number = group, n

    def wait(self) -> None:
        came = self._group.network.take(self._group, self._number)
        for rows, part in zip(came, self._parts, strict=True):
            assert rows.shape == part.shape, f"{tuple(rows.shape)} came, {tuple(part.shape)} wanted"
            with torch.no_grad():
                part.copy_(rows)


def _start_all_to_all(
    received_RX: Tensor,
    rows_NX: Tensor,
    *,
    send_counts: list[int],
    recv_counts: list[int],
    group: Group,
    where: str,
) -> _Transfer:
    assert send_counts[group.ranks.index(group.rank)] == 0, "rows for oneself"
    with torch.no_grad():
        parts = [part.clone() for part in rows_NX.split(send_counts)]
        for receiver, part in zip(group.ranks, parts, strict=True):
            row_bytes = part.shape[1] * part.element_size()
            group.network.sent[group.rank, receiver, row_bytes] += part.nbytes
        return _Transfer(received_RX, recv_counts, group, group.network.send(group, parts))


def _start_counts(told: Tensor, group: Group, header: Header) -> Any:
    group.network.gathered[group.rank] += 1
    number = group.network.send(group, [told.tolist()] * len(group.ranks))
    return SimpleNamespace(wait=lambda: group.network.take(group, number))


@contextmanager
def _on_threads() -> Iterator[None]:
    """Groups of threads in place of torch's."""
    answers = SimpleNamespace(
        get_rank=lambda group: group.ranks.index(group.rank),
        get_world_size=lambda group: len(group.ranks),
        get_process_group_ranks=lambda group: list(group.ranks),
    )
    with pytest.MonkeyPatch.context() as patches:
        for module in (all_to_all, hierarchical, counts):
            patches.setattr(module, "dist", answers)
        for module in (all_to_all, hierarchical):
            patches.setattr(module, "start_counts", _start_counts)
        patches.setattr(all_to_all, "start_all_to_all", _start_all_to_all)
        yield
