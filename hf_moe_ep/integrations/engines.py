"""Weight transfer from a patched model to a generation engine (vLLM) in TRL.

TRL gathers one parameter at a time and sends it under its name in transformers. Experts are stacked
there, which vLLM's loaders of MoE models do not read. With PEFT, TRL merges the adapters into the
model first, which a sharded model refuses. Here both of TRL's ways, to a server and to an engine in
the same process, send the tensors of `hub_tensors`, with adapters merged into copies.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_moe_ep.checkpoints.hub.tensors import hub_tensors
from hf_moe_ep.state import find_state


def iter_named_params(original: Callable[..., Any], self: Any) -> Iterator[tuple[str, Tensor]]:
    """Wrap `VLLMGeneration._iter_named_params`: yield hub names and whole, merged tensors."""
    if find_state(self.model) is None:
        params: Iterator[tuple[str, Tensor]] = original(self)
        return params
    return hub_tensors(self.model, merge_adapters=True)


def sync_weights(original: Callable[..., None], self: Any) -> None:
    """Wrap `VLLMGeneration.sync_weights`: if one rank fails, the other ranks raise as well."""
    if find_state(self.model) is None:
        original(self)
        return
    try:
        original(self)
    except Exception as error:
        # The iterator tells the other ranks when it is deleted. The frames of an error keep the
        # iterator alive, so they are cleared.
        for one in _with_causes(error):
            traceback.clear_frames(one.__traceback__)
        raise


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, the errors behind it (cause, context), and the members of error groups."""
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        one = found.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        found += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
