"""Find out which ranks did not take part in a collective that failed.

The error of a backend names a socket, or no rank at all. So each rank whose collective failed
appends a line to one key of the store, and then reads the lines of the other ranks for a while.
A rank without a line stopped, died, or is late. Four ranks, of which rank 3 died:

    0 MoE layer 3 of forward 12 (..): counts
    2 MoE layer 3 of forward 12 (..): counts
    1 MoE layer 3 of forward 12 (..): counts

Ranks 0, 1 and 2 each raise "rank 3 stopped, or never reached this layer ..".

The store serves gloo and NCCL alike. `torch.distributed.monitored_barrier` would not: it needs
gloo, and it sends through the same connections that have just failed.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from hf_moe_ep.upstream.process_groups import default_store

# A rank reads until no new line came for _QUIET seconds, and never longer than _LONGEST.
_QUIET, _LONGEST = 3.0, 9.0
# Seconds after which a store that does not answer counts as lost.
_STORE_TIMEOUT = 12.0


def name_missing_ranks(failed: str, group: dist.ProcessGroup | None) -> str:
    """Return the subject of an error: the ranks of `group` that did not reach `failed`.

    `failed` describes the collective that failed; `group` is the default group if it is None.
    """
    answers: list[str] = []

    def ask_store() -> None:
        try:
            answers.append(_compare_lines(failed, group))
        except RuntimeError:  # DistStoreError is one
            answers.append("one of these ranks")

    # The rank that stopped may be the one that hosts the store, which then never answers.
    asking = threading.Thread(target=ask_store, name="hf_moe_ep missing ranks", daemon=True)
    asking.start()
    asking.join(_STORE_TIMEOUT)
    return answers[0] if answers else "rank 0, or another rank that hosts the store,"


def _compare_lines(failed: str, group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    failed_by_rank = _exchange_lines(f"hf_moe_ep/failed/{name}", failed, ranks)
    missing = [rank for rank in ranks if rank not in failed_by_rank]
    if missing:
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    elsewhere = [f"rank {rank} ({failed_by_rank[rank]})" for rank in ranks]
    elsewhere = [text for text in elsewhere if not text.endswith(f" ({failed})")]
    return elsewhere[0] if elsewhere else "none of these ranks, but the network between them,"


def _exchange_lines(key: str, failed: str, ranks: list[int]) -> dict[int, str]:
    """Append the line of this rank and return the lines of all ranks that failed, by rank."""
    store = default_store()
    store.append(key, f"{dist.get_rank()} {failed}\n")
    lines = _parse(store.get(key))
    began = last_news = time.monotonic()
    while True:
        # With all lines a rank still waits a little: if the host of the store exits at once, the
        # other ranks cannot read.
        quiet = _QUIET if set(ranks) - lines.keys() else _QUIET / 4
        if time.monotonic() > min(last_news + quiet, began + _LONGEST):
            return lines
        time.sleep(min(0.1, _QUIET / 4))
        try:
            newest = _parse(store.get(key))
        except RuntimeError:  # the host of the store has exited
            return lines
        if newest != lines:
            lines, last_news = newest, time.monotonic()


def _parse(text: bytes) -> dict[int, str]:
    lines = (line.split(" ", 1) for line in text.decode().splitlines())
    return {int(rank): failed for rank, failed in lines}
