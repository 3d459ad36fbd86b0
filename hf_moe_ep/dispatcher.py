"""The interface between a MoE layer and the dispatchers of `moe/dispatch/`.

A dispatcher plans how the tokens of one layer are sent between the ranks of an ep group, which
share the experts of the layer. `state.py` imports this file, because the state of a model contains
a dispatcher; this file must therefore not import `state.py`. The interface of one planned exchange
is in `moe/dispatch/async_exchange.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor


class RouteSource(IntEnum):
    """The source of a forward's expert ids. Ranks compare their sources before they exchange rows.

    LIVE: the router chooses. REPLAYED: `Routes` are replayed. REFUSED: the given `Routes` cannot be
    replayed, so all ranks must raise an error.
    """

    LIVE = 0
    REPLAYED = 1
    REFUSED = 2


_DESCRIPTIONS: dict[int, list[str]] = {
    RouteSource.LIVE: [],
    RouteSource.REPLAYED: ["replayed routes"],
    RouteSource.REFUSED: ["refused routes"],
}


@dataclass(frozen=True)
class Header:
    """The position of a rank in the model, and the format of its rows.

    An exchange is possible only if the headers of all ranks of an ep group are equal.
    """

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
        """Return the fields as integers, to be sent. `Header(*numbers)` restores the header."""
        return [int(value) for value in astuple(self)]

    def __str__(self) -> str:
        modes = ["training" if self.training else "evaluation"]
        modes += [] if self.grad else ["no_grad"]
        modes += ["checkpointed"] if self.checkpointed else []
        modes += ["recompute"] if self.recompute else []
        modes += _DESCRIPTIONS[self.routes]
        sizes = f"top-{self.top_k}, {self.itemsize} bytes per element"
        return f"MoE layer {self.layer} of forward {self.forward} ({', '.join(modes)}; {sizes})"


class Dispatcher(Protocol):
    """Plans the exchanges of one ep group, for all layers of a model."""

    def plan(self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int) -> Sequence[Any]:
        """Plan one `Exchange` for each chunk of consecutive tokens; every rank calls this.

        `hidden_bytes` is the size of the hidden states of one token.

        Raises:
            RuntimeError: on every rank of the group, if any rank would receive more rows than the
                config allows, or if ranks are at different positions (DeepEP cannot detect this).
        """
