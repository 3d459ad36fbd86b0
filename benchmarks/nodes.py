"""Compare hierarchical dispatch with all_to_all in training steps over two nodes.

    python benchmarks/nodes.py                              prints the table
    python benchmarks/nodes.py --write benchmarks/results   also writes it as Markdown
    python benchmarks/nodes.py --single                     runs only the case of one node

The nodes are network namespaces of this machine with two ranks each
(`tests/support/namespaces.py`), so the benchmark needs root and iproute2. `tc tbf` limits the
traffic between the nodes to --rate, but not the traffic within a node. Every rank holds two models
with the same weights, one for each dispatcher, whose steps take turns.

    step           forward, backward and AdamW, until the slowest rank is done
    ratio          hierarchical / all_to_all, turn by turn
    sent           all bytes that a node's interface sends in a step, with headers and FSDP2's
                   gradients
    one node       four ranks on one node, where hierarchical dispatch is the same as all_to_all

No GPU is measured. The ranks of both nodes share the cores of one machine, so computation takes a
larger part of a step than it would on two machines.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import over_nodes
import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from over_nodes import Figures, namespaces, run_in_turn
from torch import nn

from hf_moe_ep import apply_ep_fsdp2

PAGE = "nodes-cpu.md"
KINDS = ("hierarchical", "all_to_all")
RANKS = 4
VOCAB = 256


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the tokens of a rank, in sequences of `seq`."""

    tokens: int = 2048
    seq: int = 128
    hidden: int = 256
    intermediate: int = 16
    experts: int = 64
    top_k: int = 8
    layers: int = 2
    steps: int = 7


def build(sizes: Sizes, kind: str) -> nn.Module:
    torch.manual_seed(0)
    return apply_ep_fsdp2(qwen3_moe(sizes, VOCAB), ep_size=RANKS, dispatcher=kind).train()


def measure(sizes: Sizes) -> Figures:
    """Run steps of both models in turn, and drop the first turn."""
    models = {kind: build(sizes, kind) for kind in KINDS}
    optimizers = {
        kind: torch.optim.AdamW(model.parameters(), lr=1e-5) for kind, model in models.items()
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    input_ids = torch.randint(VOCAB, (sizes.tokens // sizes.seq, sizes.seq), generator=generator)
    batch = {"input_ids": input_ids, "labels": input_ids, "use_cache": False}
    return run_in_turn(models, optimizers, dict.fromkeys(KINDS, batch), sizes.steps)


def run(sizes: Sizes, num_nodes: int, rate: str | None) -> Figures:
    """Measure on `num_nodes` nodes, whose link is limited to `rate`."""
    return over_nodes.run(__file__, sizes, num_nodes=num_nodes, num_ranks=RANKS, rate=rate)


def report(sizes: Sizes, rate: str, cases: dict[str, Figures], about: list[str]) -> str:
    lines = [
        "# A step over two nodes: hierarchical dispatch against all_to_all\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32, ep {RANKS}; {sizes.tokens} tokens "
        f"a rank in sequences of {sizes.seq}, {RANKS} gloo ranks of one thread each, {sizes.steps} "
        f"steps",
        f"- link between the nodes: {rate} each way, by `tc tbf`; all on one machine\n",
        "| | hierarchical | all_to_all | ratio |",
        "|---|---|---|---|",
    ]
    for name, figures in cases.items():
        ours, theirs = (figures[kind] for kind in KINDS)
        lines.append(f"| {format_row(f'{name}: step, s', ours['seconds'], theirs['seconds'])} |")
        if max(theirs["sent"]) >= 0.01:
            lines.append(f"| {format_row(f'{name}: sent, MiB', ours['sent'], theirs['sent'])} |")
    lines.append(
        "\nMedian (min .. max) over steps. Every figure is explained at the top of "
        "`benchmarks/nodes.py`."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    over_nodes.add_options(parser, Sizes(), PAGE)
    parser.add_argument("--rate", default="200mbit", help="bandwidth of the link, in tc's format")
    parser.add_argument("--single", action="store_true", help="run only the case of one node")
    args = parser.parse_args()
    if args.rank:
        over_nodes.rank_main(args.rank, measure, Sizes)
        return
    if namespaces.WHY_NOT:
        print(f"not measured: {namespaces.WHY_NOT}")
        return
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    cases: dict[str, Any] = {}
    if not args.single:
        cases["two nodes"] = run(sizes, 2, args.rate)
    cases["one node"] = run(sizes, 1, None)
    text = report(
        sizes, args.rate, cases, describe_machine("benchmarks/nodes.py", load_before, RANKS)
    )
    over_nodes.write(args.write, PAGE, text)


if __name__ == "__main__":
    main()
