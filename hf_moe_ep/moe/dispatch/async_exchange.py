"""Four autograd nodes, two for the way out and two for the way home; every dispatcher runs them.

A wire connects the two nodes of one way. Forward starts the transfer in the first node and waits in
the second; backward starts it in the second and waits in the first. What backward brings does not
fit the shapes of forward's outputs, so it passes through the wire, and the nodes hand each other
`nothing`:

    the way out     _StartDispatch             _FinishDispatch
      forward         send_tokens          >     wait
      backward        wait, add_results    <     send_row_grads

    the way home    _StartCombine              _FinishCombine
      forward         send_results         >     wait, add_results
      backward        wait                 <     send_result_grads

The gradient of a row goes the way of its result: home, and added up there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import mark_without_grad, nothing


class Waits(Protocol):
    """A transfer under way; keeps what it reads and writes."""

    def wait(self) -> None:
        """Let whatever runs next on this device see the rows."""


class Wire(ABC):
    """Transfers under way, and in backward what they bring; a dispatcher says how rows travel.

    Attributes:
        transfers: what `wait` waits for; every `send_...` adds its own.
        brought: rows of gradients for the first node, one entry for each of its inputs.
        needs: which of those inputs need a gradient.
        counts_L: (row, expert) pairs per local expert, known once tokens were sent.
    """

    def __init__(self) -> None:
        self.transfers: list[Waits] = []
        self.brought: Sequence[Tensor | None] = ()
        self.needs: tuple[bool, ...] = ()
        self.counts_L: list[int] = []

    def wait(self) -> Sequence[Tensor | None]:
        """Let every transfer end; returns what backward has brought, once."""
        while self.transfers:
            self.transfers.pop(0).wait()
        brought, self.brought = self.brought, ()
        return brought

    def abandon(self) -> None:
        """Wait for every transfer where nobody reads what arrives, after an error.

        A peer that is gone is no news then: the first error is the one to be seen.
        """
        while self.transfers:
            with suppress(RuntimeError):
                self.transfers.pop(0).wait()

    @abstractmethod
    def homeward(self) -> Wire:
        """Make the wire of the way home of the rows that came by this one."""

    @abstractmethod
    def send_tokens(
        self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start the way out; rows_RH, weights_RK and ids_RK, filled once they are there."""

    @abstractmethod
    def local_ids(self, ids_RK: Tensor) -> Tensor:
        """Count the experts of `send_tokens`'s ids from this rank's first one; L = "not here"."""

    @abstractmethod
    def send_row_grads(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Start the way home of the gradients of rows and weights, None where none is needed."""

    @abstractmethod
    def send_results(self, rows_RH: Tensor) -> Tensor:
        """Start the way home; what holds the rows once they are there."""

    @abstractmethod
    def add_results(self, arrived: Tensor) -> Tensor:
        """Add up each token's rows of what `send_results` returned, once it is there."""

    @abstractmethod
    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        """Start the way of out_TH's gradient to the rows; grad_RH, filled once it is there."""


class DispatchedRows:
    """Rows on their way to the ranks of their experts."""

    def __init__(self, wire: Wire, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        try:
            *rows, ids_RK = _StartDispatch.apply(wire, x_TH, weights_TK, ids_TK)
        except BaseException:
            wire.abandon()
            raise
        self._wire, self._rows, self._ids_RK = wire, rows, ids_RK

    @property
    def counts_L(self) -> list[int]:
        return self._wire.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        rows_RH, weights_RK = _FinishDispatch.apply(self._wire, *self._rows)
        # Whoever goes on with them decides how long they stay.
        self._rows.clear()
        return rows_RH, weights_RK, self._wire.local_ids(self._ids_RK)

    def abandon(self) -> None:
        self._wire.abandon()

    def start_combine(self, rows_RH: Tensor) -> CombinedRows:
        return CombinedRows(self._wire.homeward(), rows_RH)


class CombinedRows:
    """Rows on their way home."""

    def __init__(self, wire: Wire, rows_RH: Tensor) -> None:
        self._wire, self._arriving = wire, _StartCombine.apply(wire, rows_RH)

    def abandon(self) -> None:
        self._wire.abandon()

    def finish(self) -> Tensor:
        return _FinishCombine.apply(self._wire, self._arriving)


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: Wire, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wire = wire
        wire.needs = ctx.needs_input_grad[1:3]
        sent = wire.send_tokens(x_TH, weights_TK, ids_TK)
        mark_without_grad(ctx, sent, (*wire.needs, False))
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        brought = ctx.wire.wait()
        grads = [None if rows is None else ctx.wire.add_results(rows) for rows in brought]
        return (None, *grads, None)


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, rows_RH: Tensor, weights_RK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.wire = wire
        ctx.set_materialize_grads(False)
        wire.wait()
        weights_RK = weights_RK.contiguous()
        ctx.like = rows_RH.new_empty(0), weights_RK.new_empty(0)
        ctx.shapes = rows_RH.shape, weights_RK.shape
        mark_without_grad(ctx, (rows_RH, weights_RK), ctx.needs_input_grad[1:])
        return rows_RH, weights_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wire: Wire = ctx.wire
        sent: list[Tensor | None] = []
        empty: list[Tensor | None] = []
        for grad, like, shape, needed in zip(grads, ctx.like, ctx.shapes, wire.needs, strict=True):
            # A gradient that is zero is sent too: every rank takes part in the same exchanges.
            whole = like.new_zeros(shape) if needed and grad is None else grad
            sent.append(whole if needed else None)
            empty.append(nothing(like, shape) if needed else None)
        wire.brought = wire.send_row_grads(*sent)
        return (None, *empty)


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, rows_RH: Tensor) -> Tensor:
        ctx.wire = wire
        return wire.send_results(rows_RH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.wire.wait())


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, arrived: Tensor) -> Tensor:
        ctx.wire, ctx.shape = wire, arrived.shape
        wire.wait()
        return wire.add_results(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        ctx.wire.brought = (ctx.wire.send_result_grads(grad_TH),)
        return None, nothing(grad_TH, ctx.shape)
