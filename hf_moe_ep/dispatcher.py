"""What a MoE layer asks of whatever carries its tokens between ranks; `moe/dispatch/` answers.

It stands this low because the state of a model keeps a dispatcher, and the state knows no layer.
One layer, one forward, all tokens in one chunk:

    (exchange,) = dispatcher.plan(...)       who gets what; no row travels yet
    arriving = exchange.start(...)           tokens set out to the ranks of their experts
    ... = arriving.finish()                  rows of this rank's experts are there
    returning = arriving.start_combine(...)  their results set out for home
    out_TH = returning.finish()              one row per token again

What starts returns at once, what finishes waits; backward goes the same way from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor


class RoutesTold(IntEnum):
    """What ranks tell each other of where a forward's routes come from."""

    LIVE = 0
    REPLAYED = 1
    REFUSED = 2


_ROUTES_TOLD: tuple[list[str], ...] = ([], ["replayed routes"], ["routes that it refuses"])


@dataclass(frozen=True)
class Header:
    """Where a rank is, and what it sends; equal on all ranks of an ep group."""

    forward: int
    layer: int
    training: bool
    grad: bool
    checkpointed: bool
    recompute: bool
    top_k: int
    itemsize: int
    routes: int = RoutesTold.LIVE

    def as_list(self) -> list[int]:
        """List the fields in order, as they travel."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_list(cls, values: list[int]) -> Header:
        """Make the header that came as `values`."""
        forward, layer, training, grad, checkpointed, recompute, top_k, itemsize, routes = values
        return cls(
            forward,
            layer,
            bool(training),
            bool(grad),
            bool(checkpointed),
            bool(recompute),
            top_k,
            itemsize,
            RoutesTold(routes),
        )

    def __str__(self) -> str:
        mode = ["training" if self.training else "evaluation"]
        mode += [] if self.grad else ["no_grad"]
        mode += ["checkpointed"] if self.checkpointed else []
        mode += ["recompute"] if self.recompute else []
        mode += _ROUTES_TOLD[self.routes]
        sizes = f"top-{self.top_k}, {self.itemsize} bytes per element"
        return f"MoE layer {self.layer} of forward {self.forward} ({', '.join(mode)}; {sizes})"


class Dispatcher(Protocol):
    """A way for tokens between the ranks of one ep group; one for all layers of a model."""

    def plan(
        self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int
    ) -> Sequence[Exchange]:
        """Plan one exchange for each chunk of consecutive tokens; every rank calls it.

        `hidden_bytes` is the size of one token's hidden states.

        Raises:
            RuntimeError: on every rank of the group, where one would get more rows than the
                config allows, or (if the dispatcher can tell) ranks are at different places.
        """


class Exchange(Protocol):
    """The ways of some consecutive tokens; may be started again, with the same outcome."""

    @property
    def num_tokens(self) -> int:
        """How many they are."""

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Arriving:
        """Send every token to the ranks of its experts; differentiable in tokens and weights.

        `expert_ids_TK` is what the exchange was planned from.
        """


class Arriving(Protocol):
    """Rows on their way to the ranks of their experts."""

    @property
    def counts_L(self) -> list[int]:
        """(row, expert) pairs per local expert; to be read after `finish`."""

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for rows_RH, weights_RK and expert_ids_RK.

        Weights are in fp32 or wider; ids count this rank's experts, L is "not here".
        """

    def abandon(self) -> None:
        """Let the transfer end where an error has left nobody to `finish` it."""

    def start_combine(self, rows_RH: Tensor) -> Returning:
        """Send the experts' result of every row back to the rank of its token."""


class Returning(Protocol):
    """Results on their way home."""

    def abandon(self) -> None:
        """Let the transfer end where an error has left nobody to `finish` it."""

    def finish(self) -> Tensor:
        """Wait for out_TH: the rows of each token, added in one fixed order."""


class CheckpointFrame(Protocol):
    """What a checkpoint runs twice: keeps the first run's exchanges for the later ones."""

    @property
    def replaying(self) -> bool:
        """Whether this is a later run."""

    def keep(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        exchanges: Sequence[Exchange] | None,
        topks: int = 1,
    ) -> None:
        """Remember a MoE layer of the first run: the router's choice, and what it led to."""

    def keep_weights(self, layer: int, weights_TK: Tensor, given_T1: Tensor) -> None:
        """Remember weights that stood in place of the router's, and for which tokens."""

    def weights(self, layer: int, weights_TK: Tensor) -> Tensor:
        """Return the weights of a layer that a later run has reached."""

    def take(self, layer: int, expert_ids_TK: Tensor) -> Sequence[Exchange]:
        """Return what was kept of the layer that a later run has reached."""
