"""Time steps over a slow link, with shared experts and chunks computed while rows are sent.

    python benchmarks/overlap.py                              prints the table
    python benchmarks/overlap.py --write benchmarks/results   also writes it as Markdown

Two ranks are on two network namespaces of this machine (`tests/support/namespaces.py`), so the
benchmark needs root and iproute2. `tc tbf` limits their link to each of the --rates. Every rank
holds four models with the same weights, whose steps take turns:

    one after the other    shared experts run where stock code calls them, and rows are one chunk
    shared under transfer  shared experts run while results are sent back (`moe/shared_experts.py`)
    2 chunks               like "shared under transfer", with dispatch_chunks=2
    auto                   like "shared under transfer", with dispatch_chunks="auto". The table has
                           the number of chunks that it chooses

    step     forward and backward of all layers, until the slowest rank is done
    ratio    step / step of "one after the other" in the same turn

No GPU is measured. A transfer over gloo also takes CPU time. So if the link is fast, and two ranks
share the cores of one machine, little of a transfer can be hidden.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import over_nodes
import torch
import torch.distributed as dist
from benchmark_text import spread
from over_nodes import Figures
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from hf_moe_ep import apply_ep_fsdp2

PAGE = "overlap-cpu.md"
SERIAL, SHARED, CHUNKS, AUTO = "one after the other", "shared under transfer", "2 chunks", "auto"
OPTIONS: dict[str, dict[str, Any]] = {
    SERIAL: {},
    SHARED: {},
    CHUNKS: {"dispatch_chunks": 2},
    AUTO: {"dispatch_chunks": "auto"},
}
RATES = ("100mbit", "300mbit", "")
RANKS = 2
VOCAB = 128


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the tokens of a rank, in sequences of `seq`."""

    tokens: int = 2048
    seq: int = 64
    hidden: int = 256
    intermediate: int = 192
    shared: int = 384
    experts: int = 8
    top_k: int = 2
    layers: int = 2
    steps: int = 7


def build(sizes: Sizes, kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        shared_expert_intermediate_size=sizes.shared,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    model = Qwen2MoeForCausalLM(config)
    apply_ep_fsdp2(model, ep_size=RANKS, **OPTIONS[kind]).train()
    if kind == SERIAL:
        for layer in model._hf_moe_ep.moe_layers:
            begin = layer.shared.begin
            layer.shared.begin = lambda _, begin=begin: begin(None)
    return model


def measure(sizes: Sizes) -> Figures:
    """Run steps of all models in turn. The first turn, in which "auto" measures, is dropped."""
    models = {kind: build(sizes, kind) for kind in OPTIONS}
    generator = torch.Generator().manual_seed(dist.get_rank())
    input_ids = torch.randint(VOCAB, (sizes.tokens // sizes.seq, sizes.seq), generator=generator)
    batch = {"input_ids": input_ids, "labels": input_ids, "use_cache": False}
    figures: Figures = {kind: {"seconds": [], "loss": []} for kind in OPTIONS}
    for turn in range(1 + sizes.steps):
        for kind in list(OPTIONS)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            loss = models[kind](**batch).loss
            loss.backward()
            dist.barrier()
            seconds = time.perf_counter() - began
            models[kind].zero_grad()
            if turn:
                figures[kind]["seconds"].append(seconds)
                figures[kind]["loss"].append(float(loss.detach()))
    figures[AUTO]["chunks"] = [models[AUTO]._hf_moe_ep.num_chunks]
    return figures


def run(sizes: Sizes, rate: str) -> Figures:
    """Measure with a link that is limited to `rate`. "" means no limit."""
    return over_nodes.run(__file__, sizes, num_nodes=RANKS, num_ranks=RANKS, rate=rate or None)


def report(sizes: Sizes, by_rate: dict[str, Figures], about: list[str]) -> str:
    lines = [
        "# Computation while rows travel\n",
        *about,
        f"- model: Qwen2-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, shared expert of {sizes.shared}, fp32, "
        f"ep {RANKS}; {sizes.tokens} tokens a rank, {RANKS} gloo ranks of one thread each, "
        f"{sizes.steps} steps",
        "- link between the ranks: limited by `tc tbf`, each way; all on one machine\n",
        f"| link | {' | '.join(f'{kind}, s | ratio' for kind in OPTIONS)} | chunks of auto |",
        "|---" * (2 * len(OPTIONS) + 2) + "|",
    ]
    for rate, figures in by_rate.items():
        serial = figures[SERIAL]["seconds"]
        cells = [rate or "no limit"]
        for kind in OPTIONS:
            seconds = figures[kind]["seconds"]
            ratios = [ours / other for ours, other in zip(seconds, serial, strict=True)]
            cells += [spread(seconds), spread(ratios)]
        lines.append(f"| {' | '.join(cells)} | {figures[AUTO]['chunks'][0]:.0f} |")
    lines.append(
        "\nMedian (min .. max) over steps. Every figure is explained at the top of "
        "`benchmarks/overlap.py`."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    over_nodes.main_by_rate(
        __file__, __doc__, Sizes(), RATES, page=PAGE, ranks=RANKS, measure=measure, report=report
    )


if __name__ == "__main__":
    main()
