"""Overlap the chunks of a layer: one chunk is sent while the experts compute the previous chunk.

    with OverlappedChunks() as chunks:
        for arriving in chunks.start_chunks(exchanges, tokens):
            chunks.send_back(arriving, experts(*arriving.finish()))
    out_TH = chunks.finish()

With two chunks a and b the calls run from left to right:

    start a  start b  finish a  experts a  combine a  finish b  experts b  combine b  finish a, b

Each call creates an autograd node (`async_exchange.py`). Among the nodes that are ready, backward
runs the node that was created last, so it runs these nodes from right to left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_moe_ep.dispatcher import Tokens
from hf_moe_ep.moe.dispatch.async_exchange import ArrivingRows, Exchange, ReturningRows


class OverlappedChunks:
    """The running transfers of all chunks of one layer.

    An exception can end the block while transfers are running: a recompute stops early because
    backward needs no further tensors, a kernel runs out of memory, or the user presses Ctrl-C.
    Memory must not be freed while NCCL still writes into it, so after an exception the end of the
    block waits for all transfers.
    """

    def __init__(self) -> None:
        self._arriving: list[ArrivingRows] = []
        self._returning: list[ReturningRows] = []

    def __enter__(self) -> OverlappedChunks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._abandon()

    def start_chunks(self, exchanges: Sequence[Exchange], tokens: Tokens) -> Iterator[ArrivingRows]:
        """Yield the chunks in order. Before a chunk is yielded, the next chunk is started."""
        chunks = tokens.split([exchange.num_tokens for exchange in exchanges])
        latest: ArrivingRows | None = None
        for exchange, chunk in zip(exchanges, chunks, strict=True):
            arriving, latest = latest, exchange.start(chunk)
            self._arriving.append(latest)
            if arriving is not None:
                yield arriving
        assert latest is not None
        yield latest

    def send_back(self, arriving: ArrivingRows, rows_RH: Tensor) -> None:
        """Start to send back `rows_RH`, the experts' results for the chunk `arriving`."""
        self._returning.append(arriving.start_combine(rows_RH))
        self._arriving.remove(arriving)

    def finish(self) -> Tensor:
        """Wait for the results of all chunks, and return them as out_TH."""
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
