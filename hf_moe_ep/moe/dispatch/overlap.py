"""Chunks of tokens under way: one travels while the one before it is computed.

    with WayHome() as home:
        for arriving in home.overlapped(exchanges, x_TH, weights_TK, expert_ids_TK):
            home.send(arriving, experts(*arriving.finish()))
    out_TH = home.finish()

Two chunks a and b, from left to right; backward runs the same line from right to left:

    start a  start b  finish a  experts a  combine a  finish b  experts b  combine b  home a, b

The order of these calls is the order in which autograd's nodes are made, and of the nodes that are
ready backward runs the one made last. So what overlaps here overlaps there, and a node made in the
loop before `finish` runs in backward while the rows' gradients travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor

from hf_moe_ep.dispatcher import Arriving, Exchange, Returning


class WayHome:
    """Chunks of tokens under way, and their results on the way back to the ranks of the tokens.

    An exception inside the block leaves transfers that nobody will `finish`: a recompute that stops
    once backward has all that it needs, an experts kernel that runs out of memory, Ctrl-C. Their
    memory must not be freed while NCCL still writes into it, so leaving the block waits for them.
    """

    def __init__(self) -> None:
        self._arriving: list[Arriving] = []
        self._returning: list[Returning] = []

    def __enter__(self) -> WayHome:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon()

    def overlapped(
        self,
        exchanges: Sequence[Exchange],
        x_TH: Tensor,
        weights_TK: Tensor,
        expert_ids_TK: Tensor,
    ) -> Iterator[Arriving]:
        """Yield the chunks in their order, each once the next one is on its way."""
        sizes = [exchange.num_tokens for exchange in exchanges]
        chunks = zip(
            exchanges,
            x_TH.split(sizes),
            weights_TK.split(sizes),
            expert_ids_TK.split(sizes),
            strict=True,
        )
        ahead: Arriving | None = None
        for exchange, *tensors in chunks:
            arriving, ahead = ahead, exchange.start(*tensors)
            self._arriving.append(ahead)
            if arriving is not None:
                yield arriving
        assert ahead is not None
        yield ahead

    def send(self, arriving: Arriving, rows_RH: Tensor) -> None:
        """Start the way home of a chunk, whose rows' results are `rows_RH`."""
        self._returning.append(arriving.start_combine(rows_RH))
        self._arriving.remove(arriving)

    def finish(self) -> Tensor:
        """Wait for out_TH of all chunks."""
        try:
            chunks = [chunk.finish() for chunk in self._returning]
        except BaseException:
            self._abandon()
            raise
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _abandon(self) -> None:
        for arriving in self._arriving:
            arriving.abandon()
        for returning in self._returning:
            returning.abandon()
