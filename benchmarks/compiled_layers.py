"""Measure the bytes that compiled layers move, the time of a step, and the compile time.

    python benchmarks/compiled_layers.py                              prints the tables
    python benchmarks/compiled_layers.py --write benchmarks/results   also writes them as Markdown

    bytes      the bytes per token that one decoder layer of Qwen3-30B-A3B reads and writes outside
               its MoE block, in forward and backward, in bf16. Eager counts the inputs and outputs
               of every operator. Compiled counts the inputs and outputs of every kernel, as
               inductor counts them. Planned is the number that `hf-moe-ep plan` expects of compiled
               layers (`planner/fused.py`). The MoE block returns its input. All three numbers
               include attention and products
    step       forward and backward of a small Qwen3-MoE on gloo ranks of one thread each. Both
               models have the same weights and take turns
    compiling  the seconds of the first step minus those of the second step, for a deep model and
               for a model with one layer of each kind, both in one process

Inductor needs a C++ compiler on CPUs (`apt-get install g++`). No GPU is measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from ranks import KEEP_FREED_MEMORY, spawn
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.planner import config as planner_config
from hf_moe_ep.planner.fused import Fusion, mark_compiled_regions
from hf_moe_ep.planner.work import WorkCounter
from hf_moe_ep.upstream.dispatch_modes import make_fake_mode

MODEL = "Qwen/Qwen3-30B-A3B"
CHECKPOINTS = {"none": None, "non-reentrant": False, "reentrant": True}
VOCAB = 128
PARTS = ("bytes", "compiling", "step")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the small model, and the tokens of a rank, in sequences of `seq`.

    The bytes use `layer_tokens` and `layer_seq`. The compile time uses `depth`.
    """

    layer_tokens: int = 4096
    layer_seq: int = 512
    tokens: int = 1024
    seq: int = 128
    hidden: int = 256
    intermediate: int = 64
    experts: int = 8
    top_k: int = 2
    layers: int = 4
    depth: int = 48
    ranks: int = 4
    steps: int = 7


def _return_input(self: nn.Module, hidden_states: Tensor) -> Tensor:
    return hidden_states


_return_input.__module__ = modeling_qwen3_moe.__name__


def build_one_layer(use_reentrant: bool | None, compile_layers: bool) -> nn.Module:
    """Build and patch a model with one layer of MODEL, whose experts are tiny."""
    shape = planner_config.find_config(MODEL).to_dict()
    small = {
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = Qwen3MoeConfig(**(shape | small | {"moe_intermediate_size": 8}))
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    patch(model, experts_backend="torch", compile_layers=compile_layers)
    return model


def run_layer(model: nn.Module, sizes: Sizes) -> None:
    """Run forward and backward of only the layer."""
    config: Any = model.config
    rows, length = sizes.layer_tokens // sizes.layer_seq, sizes.layer_seq
    x = torch.randn(rows, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(length)[None]
    rotary = model.model.rotary_emb(x, positions)
    out = model.model.layers[0](x, position_ids=positions, position_embeddings=rotary)
    out.backward(torch.randn_like(out))


def count_bytes(use_reentrant: bool | None, sizes: Sizes, *, fused: bool) -> float:
    """Count the bytes per token of the uncompiled layer, or with `fused` as a plan counts them.

    The layer runs on fake tensors, which have no memory.
    """
    fusion = Fusion()
    work = WorkCounter(fusion=fusion if fused else None)
    with (
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", _return_input),
        mark_compiled_regions(fusion),
    ):
        with torch.device("meta"):
            model = build_one_layer(use_reentrant, fused)
        work.begin("layer")
        with make_fake_mode():
            model.to_empty(device="cpu")
            with work:
                run_layer(model, sizes)
    return work.counted().nbytes() / sizes.layer_tokens


@contextmanager
def count_graph_bytes(found: Counter[str]) -> Iterator[None]:
    """Inside the block, sum inductor's bytes by the kind of graph: inference, forward, backward."""
    stock = GraphLowering.count_bytes

    def count(self: GraphLowering) -> Any:
        result = stock(self)
        kind = "inference" if self.is_inference else "backward" if self.is_backward else "forward"
        found[kind] += result[0]
        return result

    torch._logging.set_logs(inductor_metrics=True)
    torch._dynamo.reset()
    with mock_patch.object(GraphLowering, "count_bytes", count):
        yield
    torch._logging.set_logs()


def count_compiled_bytes(use_reentrant: bool | None, sizes: Sizes) -> float:
    """Sum inductor's bytes per token over all graphs, times the number of runs of each graph."""
    found: Counter[str] = Counter()
    with (
        mock_patch.object(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", _return_input),
        # Inductor skips its counts if a graph comes from its cache on disk.
        torch._inductor.config.patch(force_disable_caches=True),
        count_graph_bytes(found),
    ):
        run_layer(build_one_layer(use_reentrant, True), sizes)
    # The recompute of a checkpoint runs the forward graph a second time. A reentrant checkpoint
    # first runs a graph without gradients.
    runs = 2 if use_reentrant is False else 1
    total = found["inference"] + runs * found["forward"] + found["backward"]
    return total / sizes.layer_tokens


def build(sizes: Sizes, compile_layers: bool) -> nn.Module:
    torch.manual_seed(0)
    model = qwen3_moe(sizes, VOCAB, use_cache=False)
    return apply_ep_fsdp2(model, ep_size=sizes.ranks, compile_layers=compile_layers).train()


def measure_rank(rank: int, sizes: Sizes) -> dict[str, list[float]]:
    """Time steps of the eager and the compiled model in turn. The first turn compiles."""
    torch.set_num_threads(1)
    models = {"eager": build(sizes, False), "compiled": build(sizes, True)}
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB, (sizes.tokens // sizes.seq, sizes.seq), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(2 + sizes.steps):
        for name in list(models)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            began = time.perf_counter()
            models[name](input_ids=ids, labels=ids).loss.backward()
            dist.barrier()
            if turn > 1:
                seconds[name].append(time.perf_counter() - began)
            models[name].zero_grad()
    return seconds


def measure_compile_seconds(sizes: Sizes, layers: int, dense: list[int]) -> float:
    """Return the seconds of a model's first step minus the seconds of its second step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=dense,
    )
    model = patch(Qwen3MoeForCausalLM(config), experts_backend="torch", compile_layers=True).train()
    ids = torch.randint(VOCAB, (2, 17))
    seconds = []
    with torch._inductor.config.patch(force_disable_caches=True):
        for _ in range(2):
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            seconds.append(time.perf_counter() - began)
    return seconds[0] - seconds[1]


def measure_bytes(sizes: Sizes) -> dict[str, tuple[float, float, float]]:
    """Measure the bytes per token, by the kind of checkpoints: eager, compiled, planned."""
    return {
        name: (
            count_bytes(use_reentrant, sizes, fused=False),
            count_compiled_bytes(use_reentrant, sizes),
            count_bytes(use_reentrant, sizes, fused=True),
        )
        for name, use_reentrant in CHECKPOINTS.items()
    }


def report_bytes(found: dict[str, tuple[float, float, float]]) -> list[str]:
    lines = [
        "| checkpoints | eager, kB per token | compiled, kB per token | compiled / eager "
        "| planned / compiled |",
        "|---|---|---|---|---|",
    ]
    for name, (eager, compiled, planned) in found.items():
        lines.append(
            f"| {name} | {eager / 1e3:.1f} | {compiled / 1e3:.1f} | {compiled / eager:.3f} "
            f"| {planned / compiled:.2f} |"
        )
    return lines


def report_step(sizes: Sizes, seconds: dict[str, list[float]]) -> list[str]:
    return [
        "| | compiled | eager | ratio |",
        "|---|---|---|---|",
        f"| {format_row('seconds', seconds['compiled'], seconds['eager'])} |",
        f"\nQwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32, ep {sizes.ranks}, {sizes.tokens} "
        f"tokens a rank, {sizes.steps} steps; median (min .. max), ratios turn by turn.",
    ]


def report_compiling(compiling: dict[str, float]) -> list[str]:
    rows = [f"| {name} | {value:.1f} |" for name, value in compiling.items()]
    return ["| model | seconds |", "|---|---|", *rows]


def report(sections: dict[str, list[str]], about: list[str]) -> str:
    lines = ["# Compiled layers\n", *about]
    for title, section in sections.items():
        lines += [f"\n## {title}\n", *section]
    lines.append("\nEvery figure is explained at the top of `benchmarks/compiled_layers.py`.")
    return "\n".join(lines) + "\n"


def measure_compiling(sizes: Sizes) -> dict[str, float]:
    two, deep = "2 layers, dense and MoE", f"{sizes.depth} layers, one dense"
    measure_compile_seconds(sizes, 2, [0])  # imports of the compiler
    return {
        two: measure_compile_seconds(sizes, 2, [0]),
        deep: measure_compile_seconds(sizes, sizes.depth, [0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--write", type=Path, help="also write compiled-layers-cpu.md there")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    sections: dict[str, list[str]] = {}
    if "bytes" in args.parts:
        found = report_bytes(measure_bytes(sizes))
        tokens = f"{sizes.layer_tokens} tokens in sequences of {sizes.layer_seq}"
        found.append(f"\nForward and backward of {tokens}.")
        sections[f"Bytes of a layer of {MODEL} outside of its MoE block"] = found
    if "compiling" in args.parts:
        sections["Compiling"] = report_compiling(measure_compiling(sizes))
    if "step" in args.parts:
        by_rank = spawn(
            measure_rank, sizes.ranks, sizes, timeout=900.0, environment=KEEP_FREED_MEMORY
        )
        sections["A step"] = report_step(sizes, by_rank[0])
    text = report(
        sections, describe_machine("benchmarks/compiled_layers.py", load_before, sizes.ranks)
    )
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "compiled-layers-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
