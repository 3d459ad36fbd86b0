"""Chunks of tokens under way: one travels while the one before it is computed.

    with WayHome() as home:
        for arriving in overlapped(exchanges, x_TH, weights_TK, expert_ids_TK):
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
from hf_moe_ep.upstream.autograd_modes import StopRecomputation


def overlapped(
    exchanges: Sequence[Exchange], x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor
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
    started = (exchange.start(*tensors) for exchange, *tensors in chunks)
    arriving = next(started)
    for following in started:
        yield arriving
        arriving = following
    yield arriving


class WayHome:
    """Results on their way back to the ranks of their tokens, chunk by chunk.

    A recompute stops inside the block once backward has all that it needs. Nobody will `finish`
    the chunks sent by then, and memory of a transfer that nobody waits for stays taken until NCCL
    looks after it: so leaving the block that way waits for them.
    """

    def __init__(self) -> None:
        self._returning: list[Returning] = []

    def __enter__(self) -> WayHome:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, StopRecomputation):
            for chunk in self._returning:
                chunk.wait()

    def send(self, arriving: Arriving, rows_RH: Tensor) -> None:
        """Start the way home of a chunk, whose rows' results are `rows_RH`."""
        self._returning.append(arriving.start_combine(rows_RH))

    def finish(self) -> Tensor:
        """Wait for out_TH of all chunks."""
        chunks = [chunk.finish() for chunk in self._returning]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
