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

# Seconds that others have to give up too, and until a store that is silent counts as gone.
_MOMENT, _SILENT = 3.0, 8.0


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
    until = time.monotonic() + _MOMENT
    while True:
        lines = [line.split(" ", 1) for line in store.get(key).decode().splitlines()]
        places = {int(rank): at for rank, at in lines}
        missing = [rank for rank in ranks if rank not in places]
        if not missing or time.monotonic() > until:
            break
        time.sleep(0.2)
    if missing:
        several = "s" if len(missing) > 1 else ""
        return f"rank{several} {', '.join(map(str, missing))}"
    elsewhere = [f"rank {rank} ({places[rank]})" for rank in ranks if places[rank] != place]
    return elsewhere[0] if elsewhere else "none of these ranks, but the network between them,"
