"""What a MoE layer asks of whatever carries its tokens between ranks; `moe/dispatch/` answers.

It stands this low because the state of a model keeps a dispatcher, and the state knows no layer.
One layer, one forward:

    exchange = dispatcher.plan(...)[0]       who gets what; ranks agree, no row travels yet
    arriving = exchange.start(...)           tokens set out to the ranks of their experts
    ... = arriving.finish()                  rows of this rank's experts are there
    returning = arriving.start_combine(...)  their results set out for home
    out_TH = returning.finish()              one row per token again

What starts returns at once, what finishes waits; backward goes the same way from the end.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """The ways of some consecutive tokens; may be started again, with the same outcome."""

    @property
    def num_tokens(self) -> int: ...

    def start(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Arriving:
        """Send every token to the ranks of its experts; differentiable in tokens and weights."""


class Arriving(Protocol):
    """Rows on their way to the ranks of their experts."""

    @property
    def counts_L(self) -> list[int]:
        """(row, expert) pairs per local expert; to be read after `finish`."""

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """rows_RH, weights_RK in fp32 or wider, and expert_ids_RK: local, L = "not here"."""

    def start_combine(self, rows_RH: Tensor) -> Returning:
        """Send the experts' result of every row back to the rank of its token."""


class Returning(Protocol):
    """Results on their way home."""

    def wait(self) -> None:
        """Let the transfer end where nobody is going to `finish` it."""

    def finish(self) -> Tensor:
        """out_TH: the rows of each token, added in one fixed order."""
