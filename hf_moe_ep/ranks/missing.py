"""`name_missing_ranks`: find out which ranks did not take part in a collective that failed.

The error of a backend names a socket, or no rank at all. So each rank whose collective failed
appends a line to one key of the store, the key-value store of torch.distributed, and then reads the
lines of the other ranks for a while. A rank without a line stopped, died, or is late. For example,
rank 3 of four ranks died in MoE layer 7. Each line begins with the rank that wrote it:

    0 MoE layer 7 of forward 12 (..): counts
    2 MoE layer 7 of forward 12 (..): counts
    1 MoE layer 7 of forward 12 (..): counts

Ranks 0, 1 and 2 each raise "rank 3 stopped, or never reached this layer ..".

The store works with gloo and with NCCL. `torch.distributed.monitored_barrier` needs gloo, and sends
through the same connections that have just failed.

A rank that has raised an error of its own can report it by `report_error`. Then the other ranks
name this error instead of missing ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from hf_moe_ep.upstream.process_groups import default_store

# A rank reads until there was no new line for _QUIET seconds, but at most for _LONGEST seconds.
_QUIET, _LONGEST = 3.0, 9.0
# How many seconds a rank waits for an answer of the store.
_STORE_TIMEOUT = 12.0
# A line with this text has the error of a rank instead of a collective.
_ERROR = "error of "

Answer = TypeVar("Answer")


def name_missing_ranks(failed: str, group: dist.ProcessGroup | None) -> str:
    """Return the ranks of `group` that did not reach a collective, as the subject of a sentence.

    `failed` describes the collective. If `group` is None, the default group is meant.
    """

    def compare() -> str:
        try:
            return _compare_lines(failed, group)
        except RuntimeError:  # DistStoreError is a RuntimeError
            return "one of these ranks"

    answer = _ask_store(compare)
    return "rank 0, or another rank that hosts the store," if answer is None else answer


def report_error(text: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Let `find_error` and `name_missing_ranks` return `text` on the other ranks of `groups`.

    `text` begins with the rank that has raised the error, and has one line.
    """

    def report() -> None:
        for group in groups:
            default_store().append(_key(group), f"{dist.get_rank()} {_ERROR}{text}\n")

    _ask_store(report)


def find_error(groups: Sequence[dist.ProcessGroup]) -> str | None:
    """Return an error that a rank of `groups` has reported, without waiting; None without one."""

    def find() -> str | None:
        store = default_store()
        for group in groups:
            if store.check([_key(group)]):
                for line in _parse(store.get(_key(group))).values():
                    if line.startswith(_ERROR):
                        return line.removeprefix(_ERROR)
        return None

    return _ask_store(find)


def _ask_store(ask: Callable[[], Answer]) -> Answer | None:
    """Return what `ask` returns; None if the store does not answer.

    If the rank that hosts the store has stopped, the store may never answer.
    """
    answers: list[Answer] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="hf_moe_ep missing ranks", daemon=True)
    thread.start()
    thread.join(_STORE_TIMEOUT)
    return answers[0] if answers else None


def _key(group: dist.ProcessGroup | None) -> str:
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return f"hf_moe_ep/failed/{name}"


def _compare_lines(failed: str, group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    failed_by_rank = _exchange_lines(_key(group), failed, ranks)
    for line in failed_by_rank.values():
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    missing = [rank for rank in ranks if rank not in failed_by_rank]
    if missing:
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    elsewhere = [rank for rank in ranks if failed_by_rank[rank] != failed]
    if elsewhere:
        return f"rank {elsewhere[0]} ({failed_by_rank[elsewhere[0]]})"
    return "none of these ranks, but the network between them,"


def _exchange_lines(key: str, failed: str, ranks: list[int]) -> dict[int, str]:
    """Append the line of this rank to `key`, and return {rank: collective} of all lines."""
    store = default_store()
    store.append(key, f"{dist.get_rank()} {failed}\n")
    lines = _parse(store.get(key))
    began = last_change = time.monotonic()
    while True:
        # A rank that has all lines still waits a little: if it hosts the store and exits at once,
        # the other ranks cannot read.
        is_known = any(line.startswith(_ERROR) for line in lines.values())
        quiet = _QUIET if set(ranks) - lines.keys() and not is_known else _QUIET / 4
        if time.monotonic() > min(last_change + quiet, began + _LONGEST):
            return lines
        time.sleep(min(0.1, _QUIET / 4))
        try:
            newest = _parse(store.get(key))
        except RuntimeError:  # the host of the store has exited
            return lines
        if newest != lines:
            lines, last_change = newest, time.monotonic()


def _parse(text: bytes) -> dict[int, str]:
    lines = (line.split(" ", 1) for line in text.decode().splitlines())
    return {int(rank): failed for rank, failed in lines}
