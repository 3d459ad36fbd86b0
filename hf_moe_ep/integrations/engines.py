"""TRL's sync of weights to an engine that generates (vLLM), for a patched model.

TRL would gather parameters one by one, under the names that modules of transformers have: experts
stacked, which vLLM's loaders of MoE models do not know. With PEFT it merges adapters into the model
first, which a sharded one refuses. Here both of its ways, to a server and to an engine in the same
process, take the hub's tensors from `hub_tensors`, adapters merged in flight.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_moe_ep.checkpoints.hub.tensors import hub_tensors
from hf_moe_ep.state import find_state


def iter_named_params(original: Callable[..., Any], self: Any) -> Iterator[tuple[str, Tensor]]:
    """`VLLMGeneration._iter_named_params`: hub keys and whole tensors, adapters merged."""
    if find_state(self.model) is None:
        params: Iterator[tuple[str, Tensor]] = original(self)
        return params
    return hub_tensors(self.model, merge_adapters=True)


def sync_weights(original: Callable[..., None], self: Any) -> None:
    """`VLLMGeneration.sync_weights`: where it fails on one rank, the others hear of it."""
    if find_state(self.model) is None:
        original(self)
        return
    try:
        original(self)
    except Exception as error:
        # Errors keep frames alive that keep the iterator, which tells other ranks when it goes.
        for one in _with_causes(error):
            traceback.clear_frames(one.__traceback__)
        raise


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and those that it was raised from, or behind, or holds."""
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        found += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
