"""The interface between a MoE layer and the dispatchers of `moe/dispatch/`.

A dispatcher plans how the tokens of one layer are sent between the ranks of an ep group. The state
of a model refers to its dispatcher, so this file must not import `state.py`. The interface of one
planned exchange is in `moe/dispatch/async_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor


class RouteSource(IntEnum):
    """Where the expert ids of a forward come from; ranks compare it before they exchange rows."""

    LIVE = 0
    REPLAYED = 1
    REFUSED = 2


_IN_WORDS: dict[int, list[str]] = {
    RouteSource.LIVE: [],
    RouteSource.REPLAYED: ["replayed routes"],
    RouteSource.REFUSED: ["routes that it refuses"],
}


@dataclass(frozen=True)
class Header:
    """The position of a rank in the model, and what it sends; equal on all ranks of an ep group."""

    forward: int
    layer: int
    training: bool
    grad: bool
    checkpointed: bool
    recompute: bool
    top_k: int
    itemsize: int
    routes: int = RouteSource.LIVE

    def as_list(self) -> list[int]:
        """List the fields in order, as they are sent; `Header(*numbers)` is the header again."""
        return [int(value) for value in astuple(self)]

    def __str__(self) -> str:
        mode = ["training" if self.training else "evaluation"]
        mode += [] if self.grad else ["no_grad"]
        mode += ["checkpointed"] if self.checkpointed else []
        mode += ["recompute"] if self.recompute else []
        mode += _IN_WORDS[self.routes]
        sizes = f"top-{self.top_k}, {self.itemsize} bytes per element"
        return f"MoE layer {self.layer} of forward {self.forward} ({', '.join(mode)}; {sizes})"


class Dispatcher(Protocol):
    """Plans the exchanges of one ep group, for all layers of a model."""

    def plan(self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int) -> Sequence[Any]:
        """Plan one `Exchange` for each chunk of consecutive tokens; every rank calls this.

        `hidden_bytes` is the size of the hidden states of one token.

        Raises:
            RuntimeError: on every rank of the group, if one would receive more rows than the config
                allows, or (if the dispatcher can tell) if ranks are at different positions.
        """
