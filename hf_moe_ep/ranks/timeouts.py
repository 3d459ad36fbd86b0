"""`explain_timeout`: name the ranks that did not take part in a collective that failed.

The error of a backend names a socket, or no rank at all. Each rank whose collective failed
therefore appends a line to one key of the store, the key-value store of torch.distributed, and then
reads the lines of the other ranks for a few seconds. A rank without a line stopped, died, or is
late. For example, rank 3 of four ranks died in MoE layer 7. Each line begins with the rank that
wrote it:

    0 MoE layer 7 of forward 12 (..): counts
    2 MoE layer 7 of forward 12 (..): counts
    1 MoE layer 7 of forward 12 (..): counts

Ranks 0, 1 and 2 each raise "MoE layer 7 .. could not be exchanged; rank 3 stopped, or never reached
this layer within the process group's timeout (..)".

The store works with gloo and with NCCL. `torch.distributed.monitored_barrier` needs gloo, and sends
through the same connections that have just failed.

A rank that raises an error of its own can call `report_error`. The other ranks then name this error
instead of the missing ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_moe_ep.upstream.process_groups import get_default_store

# A rank reads lines until none has come for _QUIET seconds, but at most for _LONGEST seconds.
_QUIET, _LONGEST = 3.0, 9.0
# The number of seconds for which a rank waits for an answer of the store.
_STORE_TIMEOUT = 12.0
# A line that begins with this text names the error of a rank instead of a collective.
_ERROR = "error of "

Answer = TypeVar("Answer")


@contextmanager
def explain_timeout(
    place: object,
    group: dist.ProcessGroup | None,
    failure: str,
    *,
    goal: str = "this operation",
    limit: str = "the process group's timeout",
) -> Iterator[None]:
    """Replace a RuntimeError of the block by an error that names the missing ranks of `group`.

    The new text is "PLACE FAILURE; rank 3 stopped, or never reached GOAL within LIMIT (ERROR)".
    An error of this rank's GPU is not replaced, and neither is an error that is raised after the
    process group was destroyed.

    Args:
        place: names the collective, by the same text on every rank that has reached it. The text is
            made only for an error.
        group: None for the default group.
        failure: begins with a space or with the punctuation after PLACE.
    """
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        missing = name_missing_ranks(str(place), group)
        raise RuntimeError(
            f"{place}{failure}; {missing} stopped, or never reached {goal} within {limit} ({error})"
        ) from error


def name_missing_ranks(place: str, group: dist.ProcessGroup | None) -> str:
    """Return the ranks of `group` that did not reach a collective, as the subject of a sentence.

    `place` names the collective. If `group` is None, the default group is meant.
    """

    def compare() -> str:
        try:
            return _compare_lines(place, group)
        except RuntimeError:  # DistStoreError is a RuntimeError
            return "one of these ranks"

    answer = _ask_store(compare)
    return "rank 0, or another rank that hosts the store," if answer is None else answer


def report_error(text: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Make `find_error` and `name_missing_ranks` return `text` on the other ranks of `groups`.

    `text` is a single line, which begins with the rank that has raised the error.
    """

    def report() -> None:
        for group in groups:
            get_default_store().append(_key(group), f"{dist.get_rank()} {_ERROR}{text}\n")

    _ask_store(report)


def find_error(groups: Sequence[dist.ProcessGroup]) -> str | None:
    """Return the error that a rank of `groups` has reported so far, or None."""

    def find() -> str | None:
        store = get_default_store()
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


def _compare_lines(place: str, group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    place_by_rank = _exchange_lines(_key(group), place, ranks)
    for line in place_by_rank.values():
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    missing = [rank for rank in ranks if rank not in place_by_rank]
    if missing:
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    elsewhere = [rank for rank in ranks if place_by_rank[rank] != place]
    if elsewhere:
        return f"rank {elsewhere[0]} ({place_by_rank[elsewhere[0]]})"
    return "none of these ranks, but the network between them,"


def _exchange_lines(key: str, place: str, ranks: list[int]) -> dict[int, str]:
    """Append the line of this rank to `key`, and return {rank: place} of all lines."""
    store = get_default_store()
    store.append(key, f"{dist.get_rank()} {place}\n")
    lines = _parse(store.get(key))
    began = last_change = time.monotonic()
    while True:
        # A rank that has read all lines still waits a little, because the other ranks could not
        # read any more if the rank that hosts the store exited immediately.
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
    return {int(rank): place for rank, place in lines}
