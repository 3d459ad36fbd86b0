"""Measure one attention layer with context parallelism, on 4 ranks that share a batch.

    python benchmarks/context_parallel.py                              prints the table
    python benchmarks/context_parallel.py --write benchmarks/results   also writes Markdown, a plot

A Qwen3-MoE with one decoder layer is measured with four methods:

    stock         the unpatched model computes the whole sequence with SDPA
    sp            sp_size 4: each rank computes a quarter of the heads for the whole sequence
    cp, gather    cp_size 4: each rank keeps its queries, and all-gathers keys and values
                  (sequence/context.py)
    cp, ring      cp_size 4: each rank keeps its queries, and the ranks send keys and values around
                  a ring (sequence/ring.py)

The figures of a rank:

    activations    bytes of the storages that autograd saves in the forward of the attention module,
                   without parameters
    peak           the largest number of bytes that are alive at one time among the tensors created
                   in the forward of this module
    sent           bytes that the rank sends in the forward of this module, counted when torch
                   dispatches the collectives
    seconds        forward and backward of the whole model, on four real ranks, until the slowest
                   rank is done. With --steps 0 they are not measured

Bytes are counted on rank 1 of a simulated group: the other ranks do not exist, and collectives
return tensors of the right size with arbitrary values. A second table has these counts for other cp
sizes. The script stops if the bytes of keys and values differ from (cp - 1) / cp * 2 * T * kv * d
per layer, for T tokens, kv heads and heads of width d. On a CPU, the ring computes all scores of
two pieces at a time in plain PyTorch, so its peak and its seconds say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from mixers import Measured, PeakBytes, SentInForward
from ranks import KEEP_FREED_MEMORY, spawn
from sequence import saved_storages
from timing import seconds_of_step
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.sequence import context, split
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 4
METHODS = ("stock", "sp", "cp, gather", "cp, ring")
CP_SIZES = (2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """The length of the sequence, hidden size, heads, key-value heads, and measured steps."""

    seq: int = 16384
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    steps: int = 1


def build(sizes: Sizes, method: str) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=sizes.hidden,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=sizes.seq,
        attn_implementation="flex_attention" if method == "cp, ring" else "sdpa",
    )
    return Qwen3MoeForCausalLM(config).train()


class SentWithRing(SentInForward):
    """Also counts the bytes that a rank sends to the next rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "c10d.send.default":
            self.sent += sum(x.nbytes for x in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def prepare_step(sizes: Sizes, method: str) -> tuple[nn.Module, nn.Module, Callable[[], None]]:
    """Build a model. Returns the model, its attention module, and a function that runs a step."""
    model = build(sizes, method)
    attention = model.get_submodule("model.layers.0.self_attn")
    if method != "stock":
        size = {"sp_size" if method == "sp" else "cp_size": dist.get_world_size()}
        model = apply_ep_fsdp2(model, **size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 512, (1, sizes.seq), generator=generator)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    return model, attention, step


def measure_bytes(sizes: Sizes, method: str, world: int = WORLD) -> Measured:
    """Count the bytes of rank 1 in one process (of rank 0 if `world` is 1)."""
    with ExitStack() as stack:
        if method != "stock":
            stack.enter_context(fake_group(min(1, world - 1), world))
        # Other ranks do not exist, so their batches cannot be compared.
        stack.enter_context(mock.patch.object(split, "check_same_batch", lambda *args: None))
        # Transformers compiles the functions that build a BlockMask.
        stack.enter_context(mock.patch.object(torch._dynamo.config, "disable", True))
        # The hooks that count saved tensors must not be mistaken for activation checkpointing.
        first_run = mock.patch.object(context, "saved_tensors_are_hooked", lambda: False)
        stack.enter_context(first_run)
        model, attention, step = prepare_step(sizes, method)
        found: list[Measured] = []
        watch = ExitStack()
        watches: list[Any] = []

        def begin(module: nn.Module, args: Any) -> None:
            watches[:] = [watch.enter_context(w) for w in (SentWithRing(), PeakBytes())]
            watches.append(watch.enter_context(saved_storages(model)))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            watch.close()
            sent, peak, saved = watches
            found.append(Measured(sum(saved.values()), peak.peak, sent.sent))

        attention.register_forward_pre_hook(begin, prepend=True)
        attention.register_forward_hook(end)
        step()
    return found[0]


def count_key_value_bytes(sizes: Sizes, cp: int) -> int:
    """Return the bytes of keys and values that a rank must send in a forward."""
    return (cp - 1) * 2 * (sizes.seq // cp) * sizes.kv_heads * sizes.head_dim * 4


def measure_seconds(rank: int, sizes: Sizes, method: str) -> list[float]:
    """Time the steps of four ranks, after one step to warm up."""
    with mock.patch.object(torch._dynamo.config, "disable", True):
        _, _, step = prepare_step(sizes, method)
        step()
        return [seconds_of_step(step) for _ in range(sizes.steps)]


def report(
    sizes: Sizes,
    found: dict[str, Measured],
    over_cp: dict[int, dict[str, Measured]],
    seconds: dict[str, list[float]],
    machine: list[str],
) -> str:
    mib, stock = 2**20, found["stock"]
    lines = [
        "# One attention layer with context parallelism, on 4 ranks that share a sequence\n",
        *machine,
        f"- one decoder layer, hidden {sizes.hidden}, {sizes.heads} heads of {sizes.head_dim}, "
        f"{sizes.kv_heads} key-value heads, a sequence of {sizes.seq} tokens, fp32\n",
        "| way | activations, MiB | activations / stock | peak, MiB | peak / stock | sent, MiB "
        "| s |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, figures in found.items():
        cells = [
            f"{figures.activations / mib:.1f}",
            f"{figures.activations / stock.activations:.3f}",
            f"{figures.peak / mib:.1f}",
            f"{figures.peak / stock.peak:.2f}",
            f"{figures.sent / mib:.1f}",
            spread(seconds[method]) if method in seconds else "-",
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += [
        "\nOver the number of cp ranks, activations and peak as shares of stock's, and MiB sent:\n",
        "| cp | gather, activations | ring, activations | gather, peak | ring, peak | gather, sent "
        "| ring, sent |",
        "|---|---|---|---|---|---|---|",
    ]
    for cp, measured in over_cp.items():
        shares = [f"{x.activations / stock.activations:.3f}" for x in measured.values()]
        peaks = [f"{x.peak / stock.peak:.2f}" for x in measured.values()]
        sent = [f"{x.sent / mib:.1f}" for x in measured.values()]
        lines.append(f"| {cp} | {' | '.join(shares + peaks + sent)} |")
    lines.append("\nEvery figure is explained at the top of `benchmarks/context_parallel.py`.")
    return "\n".join(lines) + "\n"


def plot(over_cp: dict[int, dict[str, Measured]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, 3, figsize=(11, 3.2))
    sizes = [*over_cp]
    labels = {
        "activations": "saved by attention, MiB",
        "peak": "peak in the forward of attention, MiB",
        "sent": "keys and values sent, MiB",
    }
    for axes, (name, label) in zip(all_axes, labels.items(), strict=True):
        for method in METHODS[2:]:
            values = [getattr(over_cp[cp][method], name) / 2**20 for cp in sizes]
            axes.plot(sizes, values, "o-", label=method)
        axes.set_ylabel(label)
        axes.set_xlabel("cp_size")
        axes.set_xticks(sizes)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="folder for context-cpu.md and context-cpu.png")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    found = {method: measure_bytes(sizes, method) for method in METHODS}
    over_cp = {1: dict.fromkeys(METHODS[2:], found["stock"])}
    over_cp |= {cp: {w: measure_bytes(sizes, w, cp) for w in METHODS[2:]} for cp in CP_SIZES}
    for cp, measured in over_cp.items():
        for method, figures in measured.items():
            want = count_key_value_bytes(sizes, cp)
            assert figures.sent == want, f"{method}, cp {cp}: {figures.sent} bytes, want {want}"
            share = figures.activations / found["stock"].activations
            assert share <= 1.1 / cp, f"{method}, cp {cp}: {share:.3f} of stock's activations"
    seconds: dict[str, list[float]] = {}
    if sizes.steps:
        options: dict[str, Any] = {"timeout": 900.0, "environment": KEEP_FREED_MEMORY}
        for method in METHODS:
            world = 1 if method == "stock" else WORLD
            seconds[method] = spawn(measure_seconds, world, sizes, method, **options)[0]
    machine = describe_machine("benchmarks/context_parallel.py", load_before, WORLD)
    text = report(sizes, found, over_cp, seconds, machine)
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "context-cpu.md").write_text(text)
        plot(over_cp, args.write / "context-cpu.png")


if __name__ == "__main__":
    main()
