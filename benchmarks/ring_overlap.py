"""Measure how much of the transfers of ring attention is hidden by attention, over slow links.

    python benchmarks/ring_overlap.py                              prints the table
    python benchmarks/ring_overlap.py --write benchmarks/results   also writes it as Markdown

Four cp ranks are in four network namespaces of this machine (`tests/support/namespaces.py`), so the
benchmark needs root and iproute2. `tc tbf` limits the rate at which each rank sends. Forward and
backward of one attention layer (sequence/ring.py) run with three methods, which take turns:

    overlapped    as in training: keys, values and gradients are sent while attention is computed
    afterwards    the same transfers, but each transfer starts after the attention of its step
    no transfer   every rank uses its own keys instead of other ranks' keys, so the results are
                  wrong, and only the computation takes time

    s         seconds until the slowest rank is done
    hidden    (afterwards - overlapped) / (afterwards - no transfer). It is 1 if overlapped steps
              take as long as only the computation

No GPU is measured. Attention is computed in plain PyTorch, and all ranks share the cores of one
machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import over_nodes
import torch
import torch.distributed as dist
from benchmark_text import spread
from over_nodes import Figures, namespaces
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from hf_moe_ep.ranks.collectives import send_to_next
from hf_moe_ep.sequence import ring
from hf_moe_ep.sequence.partial_attention import ScoreOptions
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order

PAGE = "ring-overlap-cpu.md"
OVERLAPPED, AFTERWARDS, NO_TRANSFER = "overlapped", "afterwards", "no transfer"
RATES = ("80mbit",)
RANKS = 4


@dataclass(frozen=True)
class Sizes:
    """The tokens of the sequence, heads of queries and of keys, their width, and turns."""

    seq: int = 4096
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    steps: int = 5


class _Afterwards:
    """A transfer that starts only when its result is needed."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        self._start = lambda: send_to_next(x, group, tag=tag)

    def wait(self) -> Tensor:
        return self._start().wait()


class _NoTransfer:
    """The replacement of a transfer that returns this rank's own tensor."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x.clone()


METHODS: dict[str, Callable[..., Any]] = {
    OVERLAPPED: send_to_next,
    AFTERWARDS: _Afterwards,
    NO_TRANSFER: _NoTransfer,
}


def _causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def measure(sizes: Sizes) -> Figures:
    """Run all methods in turn. The first turn is not recorded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    context = Slice(dist.group.WORLD, rank, world, sizes.seq, order=make_zigzag_order(world))
    scores = ScoreOptions(create_block_mask(_causal, 1, 1, sizes.seq, sizes.seq, device="cpu"))
    generator = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.randn(1, heads, context.local, sizes.head_dim, generator=generator).requires_grad_()
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    figures: Figures = {method: {"seconds": [], "sent": [], "sum": []} for method in METHODS}
    for turn in range(1 + sizes.steps):
        # The order within a turn alternates.
        for method in list(METHODS)[:: 1 if turn % 2 else -1]:
            with mock.patch.object(ring, "send_to_next", METHODS[method]):
                dist.barrier()
                before, began = namespaces.sent_here(), time.perf_counter()
                out = ring.attend_by_ring(query, key, value, scores, None, context)
                out.square().sum().backward()
                dist.barrier()
                seconds = time.perf_counter() - began
            assert key.grad is not None
            if turn:
                figures[method]["seconds"].append(seconds)
                figures[method]["sent"].append((namespaces.sent_here() - before) / 2**20)
                figures[method]["sum"].append(float(key.grad.double().abs().sum()))
            query.grad = key.grad = value.grad = None
    return figures


def compute_hidden_share(figures: Figures) -> float:
    """Compute the hidden share of the transfers from the medians over all turns."""
    overlapped, afterwards, no_transfer = (
        statistics.median(figures[method]["seconds"])
        for method in (OVERLAPPED, AFTERWARDS, NO_TRANSFER)
    )
    return (afterwards - overlapped) / (afterwards - no_transfer)


def run(sizes: Sizes, rate: str) -> Figures:
    """Measure with links that are limited to `rate`. "" means no limit."""
    return over_nodes.run(__file__, sizes, num_nodes=RANKS, num_ranks=RANKS, rate=rate or None)


def report(sizes: Sizes, by_rate: dict[str, Figures], about: list[str]) -> str:
    lines = [
        "# Ring attention over slow links\n",
        *about,
        f"- one layer, cp {RANKS}, a sequence of {sizes.seq} tokens, {sizes.heads} heads of "
        f"{sizes.head_dim}, {sizes.kv_heads} key-value heads, fp32; {RANKS} gloo ranks of one "
        f"thread each, {sizes.steps} turns",
        "- links: limited by `tc tbf`, each way; all on one machine\n",
        f"| link | {' | '.join(f'{method}, s' for method in METHODS)} | hidden "
        "| sent by rank 0, MiB |",
        "|---" * (len(METHODS) + 3) + "|",
    ]
    for rate, figures in by_rate.items():
        cells = [rate or "no limit", *(spread(figures[method]["seconds"]) for method in METHODS)]
        cells += [
            f"{compute_hidden_share(figures):.2f}",
            f"{statistics.median(figures[OVERLAPPED]['sent']):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        "\nMedian (min .. max) over turns. Every figure is explained at the top of "
        "`benchmarks/ring_overlap.py`."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    over_nodes.main_by_rate(
        __file__, __doc__, Sizes(), RATES, page=PAGE, ranks=RANKS, measure=measure, report=report
    )


if __name__ == "__main__":
    main()
