"""Measure the bubble and the bytes of pipeline stages, and time a step over two nodes.

    python benchmarks/stages.py                              prints the tables
    python benchmarks/stages.py --write benchmarks/results   also writes them as Markdown

1. The bubble. Each stage sleeps --wait milliseconds in each forward of a micro-batch and twice as
   long in each backward, and also computes a tiny model. So all stages take equally long, even if
   the ranks share a few cores. "waits" is the fraction of a step in which a stage waits for hidden
   states, gradients or the loss of other stages, as a mean over stages. The formula is
   (p - 1) / (m + p - 1) for p stages and m micro-batches.

2. A step over two nodes. The nodes are network namespaces of this machine with two ranks each
   (`tests/support/namespaces.py`, which needs root and iproute2). `tc tbf` limits the traffic
   between nodes to --rate. Each rank holds two models with the same weights, whose steps take
   turns. One model has two stages with ep 2, one stage per node. The other model has ep 4 over both
   nodes.

    step     forward, backward and AdamW, until the slowest rank is done
    ratio    with stages / without stages, turn by turn
    sent     all bytes that a node's interface sends in a step
    by hand  the bytes of the hidden states, or of the gradients, of all tokens of a node, which a
             stage sends
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import over_nodes
import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from over_nodes import Figures, namespaces, run_in_turn
from ranks import spawn
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.pipeline import run
from hf_moe_ep.pipeline.run import Pipeline
from hf_moe_ep.pipeline.schedule import compute_bubble
from hf_moe_ep.ranks.neighbours import Arrival

PAGE = "stages-cpu.md"
RANKS = 4
VOCAB = 256
LAYOUTS = {"stages": {"pp_size": 2, "ep_size": 2, "pp_microbatches": 8}, "ep 4": {"ep_size": 4}}
# (stages, micro-batches)
BUBBLES = ((2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16))


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the tokens of a data rank, in sequences of `seq`."""

    tokens: int = 2048
    seq: int = 128
    hidden: int = 256
    intermediate: int = 16
    experts: int = 64
    top_k: int = 8
    layers: int = 4
    steps: int = 5


@dataclass(frozen=True)
class Waited:
    """The fraction of a step that one rank waits, and the bytes that it sends in a step."""

    part: float
    sent: int
    by_hand: int


def _make_layer_sleep(layer: nn.Module, seconds: float) -> None:
    def wait(module: nn.Module, args: Any, output: Tensor) -> None:
        time.sleep(seconds)
        output.register_hook(lambda grad: time.sleep(2 * seconds))

    layer.register_forward_hook(wait)


def measure_waits(rank: int, stages: int, count: int, seconds: float) -> Waited:
    """Time the waits of one stage. A forward takes `seconds`, a backward twice as long."""
    sizes = Sizes(hidden=32, intermediate=8, experts=4, top_k=2, layers=stages)
    torch.manual_seed(0)
    model = qwen3_moe(sizes, VOCAB)
    apply_ep_fsdp2(model, pp_size=stages, pp_microbatches=count)
    _make_layer_sleep(model.model.layers[rank], seconds)
    pipeline: Pipeline = vars(model)["_call_impl"].func
    input_ids = torch.randint(VOCAB, (count, 16), generator=torch.Generator().manual_seed(0))
    waited, parts, sent = 0.0, [], 0

    def wait(self: Arrival) -> list[Tensor]:
        nonlocal waited
        began = time.perf_counter()
        tensors = stock(self)
        waited += time.perf_counter() - began
        return tensors

    def wait_for_loss(*args: Any) -> Tensor:
        # Stages that are done early wait here for the other stages.
        nonlocal waited
        began = time.perf_counter()
        numbers = stock_gather(*args)
        waited += time.perf_counter() - began
        return numbers

    stock, stock_gather = Arrival.wait, run.all_gather
    waits = patch.object(Arrival, "wait", wait)
    with waits, patch.object(run, "all_gather", wait_for_loss):
        for turn in range(4):
            dist.barrier()
            waited, before, began = 0.0, pipeline.num_bytes, time.perf_counter()
            model(input_ids=input_ids, labels=input_ids).loss.backward()
            seconds_of_step, sent = time.perf_counter() - began, pipeline.num_bytes - before
            longest = torch.tensor(seconds_of_step)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            # A stage that is done early waits until the last stage is done.
            if turn:
                parts.append((waited + float(longest) - seconds_of_step) / float(longest))
    neighbours = (rank > 0) + (rank < stages - 1)
    return Waited(median(parts), sent, neighbours * input_ids.numel() * sizes.hidden * 4)


def measure(sizes: Sizes) -> Figures:
    """Run steps of both models in turn. The first turn is a warm-up."""
    models, optimizers = {}, {}
    for name, layout in LAYOUTS.items():
        torch.manual_seed(0)
        models[name] = apply_ep_fsdp2(qwen3_moe(sizes, VOCAB), **layout).train()
        optimizers[name] = torch.optim.AdamW(models[name].parameters(), lr=1e-5)
    num_rows = sizes.tokens // sizes.seq
    generator = torch.Generator().manual_seed(0)
    # There are two data ranks with stages, and four without. Both models train the same rows.
    everything = torch.randint(VOCAB, (4 * num_rows, sizes.seq), generator=generator)
    rank = dist.get_rank()
    rows_of = {"stages": everything.chunk(2)[rank % 2], "ep 4": everything.chunk(4)[rank]}
    batches = {name: {"input_ids": rows, "labels": rows} for name, rows in rows_of.items()}
    return run_in_turn(models, optimizers, batches, sizes.steps)


def report_bubbles(milliseconds: int) -> list[str]:
    lines = [
        "| stages | micro-batches | waits, measured | (p - 1) / (m + p - 1) | measured / formula | "
        "bytes that all ranks send | by hand |",
        "|---|---|---|---|---|---|---|",
    ]
    for stages, count in BUBBLES:
        ranks = spawn(measure_waits, stages, stages, count, milliseconds / 1000, timeout=300)
        measured = sum(rank.part for rank in ranks) / stages
        formula = compute_bubble(stages, count)
        sent, by_hand = (sum(getattr(r, name) for r in ranks) for name in ("sent", "by_hand"))
        assert sent == by_hand, (sent, by_hand)
        lines.append(
            f"| {stages} | {count} | {measured:.1%} | {formula:.1%} | {measured / formula:.2f} | "
            f"{sent:,} | {by_hand:,} |"
        )
    return lines


def report_nodes(sizes: Sizes, rate: str, figures: Figures) -> list[str]:
    staged, ep_only = (figures[name] for name in LAYOUTS)
    num_rows = sizes.tokens // sizes.seq
    by_hand = 4 * num_rows * sizes.seq * sizes.hidden * 4 / 2**20
    return [
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32; {4 * num_rows} sequences of "
        f"{sizes.seq} tokens per step, {RANKS} gloo ranks of one thread each, {sizes.steps} steps",
        f"- link between the nodes: {rate} each way, by `tc tbf`; all on one machine",
        "- stages: pp 2 x ep 2, 8 micro-batches, a stage per node; without: ep 4 over both nodes\n",
        "| | 2 stages x ep 2 | ep 4 | ratio |",
        "|---|---|---|---|",
        f"| {format_row('step, s', staged['seconds'], ep_only['seconds'])} |",
        f"| {format_row('sent by a node, MiB', staged['sent'], ep_only['sent'])} |",
        f"\nA stage sends {by_hand:.1f} MiB of hidden states or gradients in a step, by hand.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    over_nodes.add_options(parser, Sizes(), PAGE)
    parser.add_argument("--rate", default="200mbit", help="bandwidth of the link, in tc's format")
    parser.add_argument("--wait", type=int, default=60, help="milliseconds of a forward")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="batches of .* micro-batches")
    if args.rank:
        over_nodes.rank_main(args.rank, measure, Sizes)
        return
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    lines = report_bubbles(args.wait)
    if namespaces.WHY_NOT:
        nodes = [f"not measured: {namespaces.WHY_NOT}"]
    else:
        figures = over_nodes.run(__file__, sizes, num_nodes=2, num_ranks=RANKS, rate=args.rate)
        nodes = report_nodes(sizes, args.rate, figures)
    about = describe_machine("benchmarks/stages.py", load_before, RANKS)
    text = "\n".join(
        [
            "# Pipeline stages: bubble, bytes, and a step over two nodes\n",
            *about,
            f"\n## The bubble\n\nA forward takes {args.wait} ms, a backward {2 * args.wait} ms.\n",
            *lines,
            "\n## A step over two nodes\n",
            *nodes,
            "\nMedian (min .. max) over steps. Every figure is explained at the top of "
            "`benchmarks/stages.py`.",
        ]
    )
    over_nodes.write(args.write, PAGE, text + "\n")


if __name__ == "__main__":
    main()
