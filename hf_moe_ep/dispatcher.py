"""The interface between a MoE layer and the dispatchers of `moe/dispatch/`.

A dispatcher plans how the tokens of one layer are sent between the ranks of an ep group, which
share the experts of the layer. The state of a model contains a dispatcher, so `state.py` imports
this file, and this file must not import `state.py`. The interface of one planned exchange is in
`moe/dispatch/async_exchange.py`.

    planning = dispatcher.start_plan(...)    starts to exchange counts, and does not wait
    dispatcher.prepare(tokens)               runs while the counts are exchanged
    exchanges = planning.finish()            waits for the counts: the layer's only host sync

DeepEP's host sync is at the start of each exchange. Its `start_plan` exchanges counts only if the
config limits the rows of a rank, which is one more host sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_moe_ep.ops.columns import join_columns, split_columns
from hf_moe_ep.ops.dtypes import choose_compute_dtype


class RouteSource(IntEnum):
    """The source of the expert ids of a forward. Ranks compare it before they exchange rows.

    LIVE: the router chooses. REPLAYED: a `replay` block is open; on a rank without `Routes` the
    router chooses. REFUSED: the given `Routes` cannot be replayed, so all ranks must raise an
    error.
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


class Tokens:
    """The tokens of a layer or chunk, with their routing and with the messages that are sent.

    Rows are sent in the dtype in which the experts compute: under bf16 autocast a token in fp32 is
    rounded before it is sent, so that half of the bytes are sent.

    Attributes:
        x_TH, weights_TK, ids_TK: the hidden states, the routing weights and the expert ids.
        row_dtype: the dtype in which rows, results and their gradients are sent.
    """

    def __init__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        messages_TI: Tensor | None = None,
    ) -> None:
        self.x_TH, self.weights_TK, self.ids_TK = x_TH, weights_TK, ids_TK
        self.row_dtype = choose_compute_dtype(x_TH)
        self._messages_TI = messages_TI

    @property
    def routing_dtype(self) -> torch.dtype:
        """The dtype in which weights and ids are sent: fp32, or wider if rows or weights are wider.

        fp32 represents all ids up to 2**24; bf16 would round ids above 256.
        """
        rows_dtype = torch.promote_types(self.row_dtype, torch.float32)
        return torch.promote_types(self.weights_TK.dtype, rows_dtype)

    def join(self) -> None:
        """Make the message of each token: its row, followed by its weights and ids.

        The row is cast to `row_dtype`, and the routing weights and ids to `routing_dtype`. This
        needs no counts, so a layer calls it while the counts are exchanged.
        """
        with torch.no_grad():
            self._messages_TI = join_columns(
                self.x_TH,
                self.weights_TK,
                self.ids_TK,
                dtype=self.row_dtype,
                right_dtype=self.routing_dtype,
            )

    def take_messages(self) -> Tensor:
        """Return the messages and drop the reference, so that the caller decides when to free them.

        The messages are made first if `join` was not called.
        """
        if self._messages_TI is None:
            self.join()
        messages_TI, self._messages_TI = self._messages_TI, None
        assert messages_TI is not None
        return messages_TI

    def split_messages(self, received_RI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, weights and ids in messages that other ranks have made by `join`."""
        hidden, top_k = self.x_TH.shape[1], self.ids_TK.shape[1]
        rows_RH, routing_RX = split_columns(received_RI, hidden, 2 * top_k, self.routing_dtype)
        return rows_RH, routing_RX[:, :top_k], routing_RX[:, top_k:]

    def split(self, sizes: list[int]) -> list[Tokens]:
        """Split the tokens into chunks of these sizes. Only the chunks keep the messages."""
        tensors = [self.x_TH, self.weights_TK, self.ids_TK]
        if self._messages_TI is not None:
            tensors.append(self.take_messages())
        return [Tokens(*parts) for parts in zip(*(x.split(sizes) for x in tensors), strict=True)]


class Planning(Protocol):
    """A plan whose counts are being exchanged.

    Attributes:
        pairs_E: the number of this rank's (token, expert) pairs of each expert, on the device; None
            if the dispatcher does not count pairs.
    """

    @property
    def pairs_E(self) -> Tensor | None: ...

    def finish(self) -> Sequence[Any]:
        """Wait for the counts, and return one `Exchange` for each chunk of consecutive tokens.

        Raises:
            RuntimeError: on every rank of the group, if at least one rank would receive more rows
                than the config allows, or if ranks are at different positions (DeepEP cannot detect
                this).
        """


class Dispatcher(Protocol):
    """Plans the exchanges of one ep group, for all layers of a model.

    Attributes:
        leaves_out_padding: True if a padding token, whose ids all stand for "no expert" (the number
            of experts), is not sent.
    """

    @property
    def leaves_out_padding(self) -> bool: ...

    def start_plan(self, expert_ids_TK: Tensor, header: Header, *, hidden_bytes: int) -> Planning:
        """Start to plan how the tokens with these ids are sent; every rank calls this.

        `hidden_bytes` is the number of bytes of one token's row.
        """

    def prepare(self, tokens: Tokens) -> None:
        """Do the part of the exchanges' work that does not need the counts, such as joining rows.

        A layer calls this after `start_plan`, so that it runs while counts are exchanged.
        """
