"""Measure how much of the transfers of context parallelism attention hides, over slow links.

    python benchmarks/ring_overlap.py                              prints the table
    python benchmarks/ring_overlap.py --write benchmarks/results   also writes it as Markdown

Four cp ranks are in four network namespaces of this machine (`tests/support/namespaces.py`), so the
benchmark needs root and iproute2. `tc tbf` limits the rate at which each rank sends. Forward and
backward of one attention layer run in two ways, by a ring (sequence/ring.py) and with sdpa and an
all-gather (sequence/context.py), and with three methods, which take turns:

    overlapped    as in training: keys, values and gradients are sent while attention is computed
    afterwards    a ring starts each transfer after the attention of its step; an all-gather sends
                  all heads at once, before attention in forward and after it in backward
    no transfer   every rank uses its own keys instead of other ranks' keys, so the results are
                  wrong, and only the computation takes time

    s         seconds until the slowest rank is done
    hidden    (afterwards - overlapped) / (afterwards - no transfer). It is 1 if overlapped steps
              take as long as only the computation. An all-gather of 4 heads of keys sends 3 heads
              while attention to another is computed, so it can hide 0.75

No GPU is measured. Attention is computed in plain PyTorch, and all ranks share the cores of one
machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import over_nodes
import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from over_nodes import Figures, namespaces
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_moe_ep.ranks.collectives import send_to_next
from hf_moe_ep.sequence import context as gathering
from hf_moe_ep.sequence import ring, slices
from hf_moe_ep.sequence.partial_attention import ScoreOptions
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order

PAGE = "ring-overlap-cpu.md"
OVERLAPPED, AFTERWARDS, NO_TRANSFER = "overlapped", "afterwards", "no transfer"
RING, GATHER = "ring", "all-gather"
RANKS = 4


@dataclass(frozen=True)
class Sizes:
    """The way, the tokens of the sequence, heads of queries and keys, their width, and turns."""

    way: str = RING
    seq: int = 4096
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    steps: int = 5


# The sizes and the link of each way. The transfers of a step take about as long as its attention.
WAYS = (
    (Sizes(), "80mbit"),
    (Sizes(way=GATHER, seq=8192, kv_heads=4), "200mbit"),
)


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


class _NothingGathered:
    """The replacement of an all-gather, or of the exchange of gradients, that sends nothing."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self.received = x if x.ndim > 4 else torch.stack([x] * RANKS)

    def wait(self) -> Tensor:
        return self.received


def _gather_nothing(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _NothingGathered(x, group).wait()


def replacements(way: str, method: str) -> Any:
    """Return a context manager that replaces the transfers of a way by those of a method."""
    if way == RING:
        transfers = {OVERLAPPED: send_to_next, AFTERWARDS: _Afterwards, NO_TRANSFER: _NoTransfer}
        return mock.patch.object(ring, "send_to_next", transfers[method])
    if method == NO_TRANSFER:
        return mock.patch.multiple(
            slices,
            all_gather=_gather_nothing,
            swap_slices=_gather_nothing,
            start_all_gather=_NothingGathered,
            start_swap=_NothingGathered,
        )
    stock = gathering._MAX_SHARES
    return mock.patch.object(gathering, "_MAX_SHARES", stock if method == OVERLAPPED else 1)


METHODS = (OVERLAPPED, AFTERWARDS, NO_TRANSFER)


def _causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def measure(sizes: Sizes) -> Figures:
    """Run all methods in turn. The first turn is not recorded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    context = Slice(dist.group.WORLD, rank, world, sizes.seq, order=make_zigzag_order(world))
    attend = _make_attention(sizes, context)
    generator = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.randn(
            1, heads, context.local_length, sizes.head_dim, generator=generator
        ).requires_grad_()
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    figures: Figures = {method: {"seconds": [], "sent": [], "sum": []} for method in METHODS}
    for turn in range(1 + sizes.steps):
        # The order within a turn alternates.
        for method in METHODS[:: 1 if turn % 2 else -1]:
            with replacements(sizes.way, method):
                dist.barrier()
                before, began = namespaces.sent_here(), time.perf_counter()
                out = attend(query, key, value)
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


def _make_attention(sizes: Sizes, context: Slice) -> Callable[..., Tensor]:
    """Return the attention function of (query, key, value) that is measured."""
    if sizes.way == RING:
        scores = ScoreOptions(create_block_mask(_causal, 1, 1, sizes.seq, sizes.seq, device="cpu"))
        return lambda *args: ring.attend_by_ring(*args, scores, None, context)
    module: Any = nn.Module()
    module.config = SimpleNamespace(_attn_implementation="sdpa")
    module.num_key_value_groups = sizes.heads // sizes.kv_heads
    return lambda *args: gathering.attend(sdpa_attention_forward, module, *args, None, context)


def compute_hidden_share(figures: Figures) -> float:
    """Compute the hidden share of the transfers from the medians over all turns."""
    overlapped, afterwards, no_transfer = (
        statistics.median(figures[method]["seconds"])
        for method in (OVERLAPPED, AFTERWARDS, NO_TRANSFER)
    )
    return (afterwards - overlapped) / (afterwards - no_transfer)


def run(sizes: Sizes, rate: str) -> Figures:
    """Measure with links that are limited to `rate`."""
    return over_nodes.run(__file__, sizes, num_nodes=RANKS, num_ranks=RANKS, rate=rate)


def report(rows: Sequence[tuple[Sizes, str, Figures]], about: list[str]) -> str:
    """Format the page from the sizes, the link and the figures of each row."""
    lines = [
        "# Attention over slow links\n",
        *about,
        f"- one layer, cp {RANKS}, fp32; {RANKS} gloo ranks of one thread each, {rows[0][0].steps} "
        f"turns",
        "- links: limited by `tc tbf`, each way; all on one machine\n",
        f"| way | tokens | heads x width, key-value heads | link "
        f"| {' | '.join(f'{method}, s' for method in METHODS)} | hidden | sent by rank 0, MiB |",
        "|---" * (len(METHODS) + 6) + "|",
    ]
    for sizes, rate, figures in rows:
        heads = f"{sizes.heads} x {sizes.head_dim}, {sizes.kv_heads}"
        cells = [sizes.way, f"{sizes.seq:,}", heads, rate]
        cells += [spread(figures[method]["seconds"]) for method in METHODS]
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
    """Measure both ways, or run one rank under a launcher."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help=f"also write {PAGE} to this folder")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        over_nodes.rank_main(options.rank, measure, Sizes)
        return
    if namespaces.WHY_NOT:
        print(f"not measured: {namespaces.WHY_NOT}")
        return
    load_before = os.getloadavg()[0]
    rows = [(sizes, rate, run(sizes, rate)) for sizes, rate in WAYS]
    about = describe_machine("benchmarks/ring_overlap.py", load_before, RANKS)
    over_nodes.write(options.write, PAGE, report(rows, about))


if __name__ == "__main__":
    main()
