"""Send the weights of a patched model from TRL to a generation engine (vLLM).

Stock TRL gathers one parameter at a time and sends it under its transformers name. Transformers
stacks the experts of a layer in one parameter, which vLLM's loaders of MoE models cannot read. With
PEFT, TRL first merges the adapters into the model, which a sharded model refuses. The wrappers send
the tensors of `hub_tensors` instead, with the adapters merged into copies, whether the engine runs
in a server or in the same process.
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
        # When the iterator of hub_tensors is deleted, it makes the other ranks raise. The traceback
        # keeps the iterator alive in its stack frames, so these frames are cleared.
        for raised in _with_causes(error):
            traceback.clear_frames(raised.__traceback__)
        raise


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes and contexts, and the members of exception groups among them."""
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
