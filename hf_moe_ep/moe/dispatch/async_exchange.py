"""Asynchronous dispatch and combine as autograd nodes, shared by all dispatchers.

The calls for one layer in one forward, if all tokens are in one chunk:

    (exchange,) = planning.finish()          waits for the counts, if the dispatcher exchanges any
    arriving = exchange.start(...)           starts to send tokens to the ranks of their experts
    ... = arriving.finish()                  waits for the rows of this rank's experts
    returning = arriving.start_combine(...)  starts to send the experts' results back
    out_TH = returning.finish()              waits for the results, and returns one row per token

Functions named "start" do not wait, functions named "finish" do. Each of the last four calls is an
autograd node, and each has a method of the `Wire` for forward and one for backward. Forward runs
from left to right, and backward from right to left:

    node        _StartDispatch       _FinishDispatch           _StartCombine    _FinishCombine
    forward     send_tokens        > wait             experts  send_results   > wait, add_results
    backward    wait, add_results  < send_row_grads   experts  wait           < send_result_grads

Backward starts a transfer where forward waited for it, and waits where forward started it.
Transfers that overlap with computation in forward therefore do so in backward. The gradients of the
experts' weights are computed after `send_row_grads` and before the last `wait`, while the gradients
of the rows are sent (`ops/expert_mlp.py`, `postpone_grads`).

Dispatch sends one copy of a token (a row) to each rank that owns one of its experts. In backward,
each of these ranks sends the gradient of its row back. The rank that owns the token adds up these
gradients with `add_results`, as it adds up the results in forward.

Autograd requires that the gradient of a forward output has the shape of this output. Received
gradients have other shapes. They are therefore stored in the `Wire` that both nodes share, and
autograd passes a placeholder of the required shape from node to node.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.dispatcher import Tokens
from hf_moe_ep.ops.autograd import make_placeholder_grad, mark_without_grad


class Exchange(Protocol):
    """The planned exchange of one chunk of tokens; a recompute may start it a second time.

    Attributes:
        num_tokens: the number of tokens in the chunk.
    """

    @property
    def num_tokens(self) -> int: ...

    def start(self, tokens: Tokens) -> ArrivingRows:
        """Start to send every token to the ranks of its experts.

        The exchange was planned from the ids of these tokens. Hidden states and weights get
        gradients.
        """


class ArrivingRows(Protocol):
    """Tokens that are being sent to the ranks of their experts.

    Attributes:
        counts_L: (row, expert) pairs per local expert; valid after `finish`.
    """

    @property
    def counts_L(self) -> list[int]: ...

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the received rows; return rows_RH, weights_RK and expert_ids_RK.

        Weights are in fp32 or wider. The ids of this rank's experts are 0 to L - 1; the id L means
        an expert of another rank.
        """

    def abandon(self) -> None:
        """Wait for the transfers after an error, instead of calling `finish`."""

    def start_combine(self, rows_RH: Tensor) -> ReturningRows:
        """Start to send the results, one per received row, back to the ranks of the tokens."""


class RunningTransfer(Protocol):
    """A transfer that has started. This object keeps the sent and received tensors alive."""

    def wait(self) -> object:
        """Make later kernels on this device wait for the transfer."""


class Wire:
    """The transfers of one pair of nodes (of dispatch, or of combine) in forward and backward.

    Every dispatcher has a subclass, which overrides the methods that raise NotImplementedError.

    Attributes:
        transfers: the running transfers; every method `send_...` appends to this list.
        received_grads: in backward, the gradients for the inputs of the first node.
        needs: for each of these inputs, True if it requires a gradient.
        counts_L: (row, expert) pairs per local expert, valid after `send_tokens`.
    """

    def __init__(self) -> None:
        self.transfers: list[RunningTransfer] = []
        self.received_grads: Sequence[Tensor | None] = ()
        self.needs: tuple[bool, ...] = ()
        self.counts_L: list[int] = []

    def wait(self) -> Sequence[Tensor | None]:
        """Wait for every transfer; return the gradients that were received, none in forward."""
        while self.transfers:
            self.transfers.pop(0).wait()
        grads, self.received_grads = self.received_grads, ()
        return grads

    def abandon(self) -> None:
        """Wait for every transfer after an error, and ignore the received rows.

        Errors of these transfers are ignored as well, because they follow from the first error.
        """
        while self.transfers:
            with suppress(RuntimeError):
                self.transfers.pop(0).wait()

    def make_combine_wire(self) -> Wire:
        """Make the wire of the combine that belongs to this dispatch."""
        raise NotImplementedError

    def send_tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Start to send tokens; return rows_RH, weights_RK and ids_RK, valid after `wait`."""
        raise NotImplementedError

    def convert_ids(self, ids_RK: Tensor) -> Tensor:
        """Convert received ids: this rank's experts get 0 to L - 1, all other experts get L."""
        raise NotImplementedError

    def send_row_grads(
        self, grad_RH: Tensor | None, grad_RK: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Start to send the gradients of rows and weights back; a gradient of None stays None."""
        raise NotImplementedError

    def send_results(self, rows_RH: Tensor) -> Tensor:
        """Start to send results back; return the tensor that receives them, valid after `wait`."""
        raise NotImplementedError

    def add_results(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up the rows of each token, after `wait`, and round the sums to `dtype`.

        `received` is the result of `send_results`, or one of the two results of `send_row_grads`.
        """
        raise NotImplementedError

    def send_result_grads(self, grad_TH: Tensor) -> Tensor:
        """Start to send each token's row of the gradient of out_TH to the ranks of its experts.

        Return grad_RH, the gradients that this rank receives; they are valid after `wait`.
        """
        raise NotImplementedError


class DispatchedRows:
    """Implement `ArrivingRows` with one `Wire`."""

    def __init__(self, wire: Wire, tokens: Tokens) -> None:
        try:
            *rows, ids_RK = _StartDispatch.apply(wire, tokens, tokens.x_TH, tokens.weights_TK)
        except BaseException:
            wire.abandon()
            raise
        self._wire, self._rows, self._ids_RK = wire, rows, ids_RK
        self._out_dtype = tokens.x_TH.dtype

    @property
    def counts_L(self) -> list[int]:
        return self._wire.counts_L

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        rows_RH, weights_RK = _FinishDispatch.apply(self._wire, *self._rows)
        # From now on only the caller keeps the rows alive.
        self._rows.clear()
        return rows_RH, weights_RK, self._wire.convert_ids(self._ids_RK)

    def abandon(self) -> None:
        self._wire.abandon()

    def start_combine(self, rows_RH: Tensor) -> ReturningRows:
        return ReturningRows(self._wire.make_combine_wire(), rows_RH, self._out_dtype)


class ReturningRows:
    """Results that are being sent back to the ranks of their tokens."""

    def __init__(self, wire: Wire, rows_RH: Tensor, out_dtype: torch.dtype) -> None:
        self._wire, self._received = wire, _StartCombine.apply(wire, rows_RH)
        self._out_dtype = out_dtype

    def abandon(self) -> None:
        self._wire.abandon()

    def finish(self) -> Tensor:
        """Wait for the results, and return out_TH: the sum of each token's rows, in fixed order."""
        return _FinishCombine.apply(self._wire, self._received, self._out_dtype)


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wire: Wire, tokens: Tokens, x_TH: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wire = wire
        ctx.dtypes = x_TH.dtype, weights_TK.dtype
        wire.needs = ctx.needs_input_grad[2:]
        sent = wire.send_tokens(tokens)
        mark_without_grad(ctx, sent, (*wire.needs, False))
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        received = ctx.wire.wait()
        grads = [
            None if rows is None else ctx.wire.add_results(rows, dtype)
            for rows, dtype in zip(received, ctx.dtypes, strict=True)
        ]
        return (None, None, *grads)


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
        placeholders: list[Tensor | None] = []
        for grad, like, shape, needed in zip(grads, ctx.like, ctx.shapes, wire.needs, strict=True):
            # A missing gradient is sent as zeros: every rank must take part in the same transfers.
            dense = like.new_zeros(shape) if needed and grad is None else grad
            sent.append(dense if needed else None)
            placeholders.append(make_placeholder_grad(like, shape) if needed else None)
        wire.received_grads = wire.send_row_grads(*sent)
        return (None, *placeholders)


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
    def forward(ctx: Any, wire: Wire, received: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.wire, ctx.like, ctx.shape = wire, received.new_empty(0), received.shape
        wire.wait()
        return wire.add_results(received, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        grad_TH = grad_TH.to(ctx.like.dtype)
        ctx.wire.received_grads = (ctx.wire.send_result_grads(grad_TH),)
        return None, make_placeholder_grad(ctx.like, ctx.shape), None
