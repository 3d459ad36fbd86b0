"""Who did not come where ranks of a group waited: asked at the store, once some have given up.

A backend's error names a socket, or nobody. So a rank that gives up leaves a line at the store,
and looks for those of the others during a moment: whoever has left none stopped, died, or is on its
way.

    0 MoE layer 3 of forward 12 (..): counts          ranks 0, 1 and 2 of four waited there:
    2 MoE layer 3 of forward 12 (..): counts          each says "rank 3 stopped, or never reached
    1 MoE layer 3 of forward 12 (..): counts          this layer .."

Nothing of it runs before something failed.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from hf_moe_ep.upstream.process_groups import default_store

# Seconds without news after which a rank counts as missing, and the store as gone.
_MOMENT, _SILENT = 3.0, 12.0
# How often others may come in that time.
_MOMENTS = 3


def name_the_missing(place: str, group: dist.ProcessGroup | None) -> str:
    """Name the ranks of `group` (default: all) that did not come to `place`, for an error."""
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(_ask(place, group))
        except RuntimeError:  # DistStoreError among them
            said.append("one of these ranks")

    # The store may be kept by the rank that stopped, and would then never answer.
    asking = threading.Thread(target=ask, name="hf_moe_ep asks who is missing", daemon=True)
    asking.start()
    asking.join(_SILENT)
    return said[0] if said else "rank 0, or whoever else keeps the store where ranks meet,"


def _ask(place: str, group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    store, key = default_store(), f"hf_moe_ep/gave up/{name}"
    store.append(key, f"{dist.get_rank()} {place}\n")
    places = _read(store.get(key))
    began = since = time.monotonic()
    # Whoever keeps the store must not go while others still come.
    while True:
        patience = _MOMENT if set(ranks) - places.keys() else _MOMENT / 4
        if time.monotonic() > min(since + patience, began + _MOMENTS * _MOMENT):
            break
        time.sleep(min(0.1, _MOMENT / 4))
        try:
            now = _read(store.get(key))
        except RuntimeError:  # its keeper has seen enough
            break
        places, since = now, since if now == places else time.monotonic()
    missing = [rank for rank in ranks if rank not in places]
    if missing:
        several = "s" if len(missing) > 1 else ""
        return f"rank{several} {', '.join(map(str, missing))}"
    elsewhere = [f"rank {rank} ({places[rank]})" for rank in ranks if places[rank] != place]
    return elsewhere[0] if elsewhere else "none of these ranks, but the network between them,"


def _read(text: bytes) -> dict[int, str]:
    """Read which rank gave up at which place."""
    lines = (line.split(" ", 1) for line in text.decode().splitlines())
    return {int(rank): place for rank, place in lines}
