"""The way home of rows: what every dispatcher shares.

A wire connects the two autograd nodes of one exchange. Forward starts the transfer in the first
node and waits in the second; backward starts it in the second and waits in the first. What backward
brings does not fit the shapes of forward's outputs, so it passes through the wire, and the nodes
hand each other `nothing`:

    forward     start_combine: send_results  >  finish: wait, take_results
    backward                   wait          <          send_grads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ops.autograd import nothing


class Waits(Protocol):
    """A transfer under way; keeps what it reads and writes."""

    def wait(self) -> None:
        """Let whatever runs next on this device see the rows."""


@dataclass
class Wire:
    """Transfers under way, and in backward what they bring; a dispatcher adds how rows travel."""

    transfers: list[Waits] = field(default_factory=list)
    brought: Sequence[Tensor | None] = ()
    needs: tuple[bool, ...] = ()

    def wait(self) -> Sequence[Tensor | None]:
        while self.transfers:
            self.transfers.pop(0).wait()
        brought, self.brought = self.brought, ()
        return brought

    def send_results(self, rows_RH: Tensor) -> Tensor:
        """Start the rows' way back to the ranks of their tokens; what holds them afterwards."""
        raise NotImplementedError

    def take_results(self, arrived: Tensor) -> Tensor:
        """out_TH from what `send_results` returned, once it is there."""
        raise NotImplementedError

    def send_grads(self, grad_TH: Tensor) -> Tensor:
        """Start the way of out_TH's gradient to the rows; grad_RH, filled once it is there."""
        raise NotImplementedError


class CombinedRows:
    """Rows on their way home."""

    def __init__(self, wire: Wire, rows_RH: Tensor) -> None:
        self._wire, self._arriving = wire, _StartCombine.apply(wire, rows_RH)

    def wait(self) -> None:
        """Let the transfer end where nobody is going to `finish` it."""
        self._wire.wait()

    def finish(self) -> Tensor:
        """out_TH: the rows of each token, added in one fixed order."""
        return _FinishCombine.apply(self._wire, self._arriving)


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
        return wire.take_results(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        ctx.wire.brought = (ctx.wire.send_grads(grad_TH),)
        return None, nothing(grad_TH, ctx.shape)
