"""Run dispatchers on ranks that are threads of one process, with a network that counts bytes.

    network = Network(4)
    results = network.run(function)          # function(rank) makes network.group(range(4), rank)

The functions of torch.distributed and `ranks/collectives.py` that `all_to_all` and `hierarchical`
call are replaced. Dozens of layouts then run in the time in which one group of processes starts. As
in a process group, the n-th exchange that a rank starts is matched with the n-th one of each other
rank. The receiver gets the rows when it waits for them; until then it would read NaN.
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

from hf_moe_ep.moe.dispatch import all_to_all, counts, hierarchical

# Seconds after which a rank stops waiting for an exchange that another rank has not started.
PATIENCE = 60.0


class Network:
    """The values that threads send each other, with a count of their bytes.

    Attributes:
        sent: (sender, receiver, bytes of a row) -> bytes of all rows.
        counted: rank -> number of exchanges of counts.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.counted: Counter[int] = Counter()
        self._started: Counter[Group] = Counter()
        self._post: dict[tuple[tuple[int, ...], int, int, int], Any] = {}
        self._changed = Condition()

    def group(self, ranks: Sequence[int], rank: int) -> "Group":
        return Group(self, tuple(ranks), rank)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call `function(rank)` in a thread for each rank. Raise the error of the lowest rank."""
        with _replaced_collectives(), ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(function, rank) for rank in range(self.world)]
            return [future.result() for future in futures]

    def send(self, group: "Group", values: Sequence[Any]) -> int:
        """Send one value to each rank of a group, and return the number of this exchange."""
        with self._changed:
            self._started[group] += 1
            number = self._started[group]
            for receiver, value in zip(group.ranks, values, strict=True):
                self._post[group.ranks, number, group.rank, receiver] = value
            self._changed.notify_all()
        return number

    def take(self, group: "Group", number: int) -> list[Any]:
        """Return the values that all ranks of a group send to this rank in an exchange."""
        keys = [(group.ranks, number, sender, group.rank) for sender in group.ranks]
        with self._changed:
            sent = self._changed.wait_for(lambda: all(key in self._post for key in keys), PATIENCE)
            assert sent, f"rank {group.rank} waits in vain for exchange {number} of {group.ranks}"
            return [self._post.pop(key) for key in keys]


@dataclass(frozen=True)
class Group:
    """A fake of a process group on one rank. `ranks` and `rank` are global ranks."""

    network: Network
    ranks: tuple[int, ...]
    rank: int


class _Transfer:
    """An exchange whose rows the receiver gets when it waits."""

    def __init__(self, received_RX: Tensor, recv_counts: list[int], group: Group, n: int) -> None:
        self._parts = received_RX.fill_(float("nan")).split(recv_counts)
        self._group, self._number = group, n

    def wait(self) -> None:
        received = self._group.network.take(self._group, self._number)
        for rows, part in zip(received, self._parts, strict=True):
            assert rows.shape == part.shape, f"got {tuple(rows.shape)}, want {tuple(part.shape)}"
            with torch.no_grad():
                part.copy_(rows)


def _start_all_to_all(
    received_RX: Tensor,
    rows_NX: Tensor,
    *,
    send_counts: list[int],
    recv_counts: list[int],
    group: Group,
    where: object,
) -> _Transfer:
    assert send_counts[group.ranks.index(group.rank)] == 0, "a rank sends rows to itself"
    with torch.no_grad():
        parts = [part.clone() for part in rows_NX.split(send_counts)]
        for receiver, part in zip(group.ranks, parts, strict=True):
            row_bytes = part.shape[1] * part.element_size()
            group.network.sent[group.rank, receiver, row_bytes] += part.nbytes
        return _Transfer(received_RX, recv_counts, group, group.network.send(group, parts))


def _start_counts(counts_DX: Tensor, group: Group, *, where: object) -> Any:
    group.network.counted[group.rank] += 1
    number = group.network.send(group, counts_DX.clone().unbind())
    return SimpleNamespace(
        wait=lambda: torch.stack(group.network.take(group, number)),
        read=lambda numbers: numbers.tolist(),
    )


@contextmanager
def _replaced_collectives() -> Iterator[None]:
    """Replace the functions that dispatchers call by functions for groups of threads."""
    dist = SimpleNamespace(
        get_rank=lambda group: group.ranks.index(group.rank),
        get_world_size=lambda group: len(group.ranks),
        get_process_group_ranks=lambda group: list(group.ranks),
    )
    with pytest.MonkeyPatch.context() as patches:
        for module in (all_to_all, hierarchical, counts):
            patches.setattr(module, "dist", dist)
        patches.setattr(counts, "start_counts", _start_counts)
        patches.setattr(all_to_all, "start_all_to_all", _start_all_to_all)
        yield
