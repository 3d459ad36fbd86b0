"""`dispatch_chunks="auto"`: choose the number of chunks from measured times of one MoE layer.

With n chunks, the experts compute one chunk while others are sent. More chunks hide more of the
transfers, but each one costs launches, the latency of more messages, and another pass over the
experts' weights. In the first forward of a training run, the ranks of an ep group measure

    transfer   the time to send the rows of all tokens to their experts, or the results back
    latency    the time to send one row to each rank
    experts    the time to compute the rows that a rank receives
    chunk      the extra time of one more chunk: launches, and reading all experts' weights again

and `choose_num_chunks` computes the duration of forward and backward for each number of chunks. For
example, rows and results take 10 ms each, experts take 10 ms, and all other times are 0:

    1 chunk     rows 0-10, experts 10-20, results 20-30                                     30 ms
    2 chunks    rows 0-5 and 5-10, experts 5-10 and 10-15, results 10-15 and 15-20          20 ms

All ranks of the group use the largest times of the group, so they choose the same number. This
number is used from the next forward on and does not change, even if later batches have another
size.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.dispatcher import Tokens
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ranks.collectives import max_over_ranks, start_all_to_all
from hf_moe_ep.state import ModelState, MoELayer

AUTO = "auto"
CANDIDATES = (1, 2, 3, 4, 6, 8)
# Several chunks must be faster than one chunk by this fraction, because measured times vary.
_GAIN = 0.03
# Larger transfers, products and copies are measured with this many bytes, and their measured times
# are multiplied.
_MAX_BYTES = 16 * 2**20
_REPETITIONS = 3
# The number of kernels that one more chunk launches in forward and backward
# (tests/ops/test_launches.py).
_LAUNCHES = 60

_logger = logging.getLogger("hf_moe_ep")


@dataclass(frozen=True)
class LayerTimes:
    """The seconds of one MoE layer in forward; the module docstring explains the fields.

    Attributes:
        shared: the time of the shared experts, which run while the last results are sent back.
    """

    transfer: float
    latency: float
    experts: float
    chunk: float
    shared: float = 0.0

    def estimate_seconds(self, num_chunks: int) -> float:
        """Return the seconds of forward and backward.

        In backward, the gradients of the rows take as long as forward. The gradients of the weights
        take as long again, and are computed while the last rows are sent.
        """
        forward = self._estimate_pipeline(num_chunks, self.shared)
        backward = self._estimate_pipeline(num_chunks, self.experts + 2 * self.shared)
        return forward + backward

    def _estimate_pipeline(self, num_chunks: int, tail: float) -> float:
        """Return the seconds of all chunks in forward, or in backward.

        A computation of `tail` seconds runs while the last rows are sent.
        """
        transfer = self.latency + self.transfer / num_chunks
        arrivals = [transfer]
        link = transfer  # when the link has sent all rows that were started so far
        now = 0.0  # when the device has computed everything that was launched so far
        for chunk in range(num_chunks):
            if chunk + 1 < num_chunks:
                link += transfer
                arrivals.append(link)
            now = max(now, arrivals[chunk]) + self.experts / num_chunks
            now += self.chunk if chunk else 0.0
            link = max(link, now) + transfer
        return max(now + tail, link)


def choose_num_chunks(times: LayerTimes, max_chunks: int = CANDIDATES[-1]) -> int:
    """Return the number of chunks with the shortest time, or 1 if several chunks gain little."""
    seconds = {n: times.estimate_seconds(n) for n in CANDIDATES if n <= max(max_chunks, 1)}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - _GAIN) * seconds[1] else 1


def measure_and_choose_num_chunks(
    layer: MoELayer, group: dist.ProcessGroup, tokens: Tokens, weights: ExpertWeights, where: object
) -> None:
    """Measure a layer, and choose the number of chunks of all layers.

    Every rank of the ep group calls this function once, in the same layer of the same forward (the
    exchange of counts has checked this).
    """
    state = layer.model
    num_tokens, hidden = tokens.x_TH.shape
    like = tokens.x_TH.new_zeros(1, hidden, dtype=tokens.row_dtype)
    with torch.no_grad():
        sizes = torch.tensor([num_tokens], dtype=torch.float64, device=like.device)
        most_tokens = int(max_over_ranks(sizes, group).item())
        top_k = tokens.ids_TK.shape[1]
        times = _measure_layer(layer, group, like, most_tokens, top_k, weights, where)
        own_times = torch.tensor(astuple(times), dtype=torch.float64, device=like.device)
        times = LayerTimes(*max_over_ranks(own_times, group).tolist())
    state.num_chunks = choose_num_chunks(times, most_tokens)
    milliseconds = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in vars(times).items())
    _logger.info(
        "dispatch_chunks='auto': %d for %d tokens of %d values (ms of a layer: %s)",
        state.num_chunks,
        most_tokens,
        hidden,
        milliseconds,
    )


def apply_num_chunks(state: ModelState) -> None:
    """Let the dispatcher send as many chunks as `measure_and_choose_num_chunks` has chosen."""
    dispatcher: Any = state.dispatcher
    if state.num_chunks is not None and dispatcher.num_chunks != state.num_chunks:
        state.dispatcher = replace(dispatcher, num_chunks=state.num_chunks)


def estimate_rows(num_tokens: int, top_k: int, num_ranks: int) -> float:
    """Return how many rows a rank sends to other ranks if all experts are chosen equally often.

    A token is sent once to each other rank that owns one of its experts. With top-1 and two ranks,
    half of the tokens are sent.
    """
    reached = 1.0 - (1.0 - 1.0 / num_ranks) ** top_k
    return num_tokens * (num_ranks - 1) * reached


def _measure_layer(
    layer: MoELayer,
    group: dist.ProcessGroup,
    like: Tensor,
    num_tokens: int,
    top_k: int,
    weights: ExpertWeights,
    where: object,
) -> LayerTimes:
    """Measure the times of a layer with `num_tokens` tokens on this rank; `like` is one row."""
    num_ranks, hidden = dist.get_world_size(group), like.shape[1]
    rows_per_rank = max(1, round(estimate_rows(num_tokens, top_k, num_ranks) / (num_ranks - 1)))
    measured = min(rows_per_rank, max(1, _MAX_BYTES // (hidden * like.element_size() * num_ranks)))
    latency = _time_transfer(group, like, 1, where)
    transfer = max(0.0, _time_transfer(group, like, measured, where) - latency)
    transfer *= rows_per_rank / measured
    values = sum(math.prod(weights.matrix_shape(name)) for name in ("up", "down"))
    per_value = _measure_seconds_per_value(like, weights, num_tokens * top_k // len(weights.up))
    launch = _time(lambda: like.add_(0.0), like.device)
    matrices = sum(t.nbytes for t in weights.named_tensors().values())
    shared = 0 if layer.shared is None else layer.shared.num_values
    return LayerTimes(
        transfer=transfer,
        latency=latency,
        experts=num_tokens * top_k * values * per_value,
        # Forward reads the weights once, backward reads them and adds to their gradients.
        chunk=_LAUNCHES / 2 * launch + 2 * matrices * _measure_seconds_per_byte(like),
        shared=num_tokens * shared * per_value,
    )


def _time_transfer(
    group: dist.ProcessGroup, like: Tensor, rows_per_rank: int, where: object
) -> float:
    """Time an all-to-all in which each rank sends this many rows to each other rank."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [0 if other == rank else rows_per_rank for other in range(num_ranks)]
    rows = like.new_zeros(sum(counts), like.shape[1])
    out = torch.empty_like(rows)

    def send() -> None:
        start_all_to_all(
            out, rows, send_counts=counts, recv_counts=counts, group=group, where=where
        ).wait()

    return _time(send, like.device)


def _measure_seconds_per_value(like: Tensor, weights: ExpertWeights, pairs: int) -> float:
    """Return the seconds of a matrix product per row and value of the matrix."""
    width, inner = weights.matrix_shape("up")
    itemsize = like.element_size()
    rows = max(1, min(pairs, _MAX_BYTES // (itemsize * max(width, inner))))
    x = like.new_zeros(rows, inner)
    matrix = like.new_zeros(inner, width)
    return _time(lambda: x @ matrix, like.device) / (rows * inner * width)


def _measure_seconds_per_byte(like: Tensor) -> float:
    """Return the seconds in which the device reads or writes one byte."""
    source = like.new_zeros(_MAX_BYTES // like.element_size())
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), like.device) / (2 * source.nbytes)


def _time(run: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest time of several calls of `run`, after one call that is not measured."""

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    seconds = []
    for _ in range(_REPETITIONS):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
