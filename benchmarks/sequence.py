"""Measure memory, communication and time of sequence parallelism with long sequences, on 4 ranks.

    python benchmarks/sequence.py                              prints the table
    python benchmarks/sequence.py --write benchmarks/results   also writes Markdown and a plot

All sequences have the same length. With sp_size 1, each of the 4 ranks trains on its own sequence.
With sp_size 4, all ranks share one sequence. The figures of a rank:

    activations    bytes of the storages that autograd saves in a forward, without parameters
    peak memory    growth of the peak resident memory over three training steps, in separate
                   processes. It includes gradients and AdamW's state, which do not depend on sp
    sent           bytes that the rank sends to other ranks of its sp group in one step, counted
                   when torch dispatches the collectives
    step           forward, backward, clipping and AdamW, until the slowest rank is done. All
                   sp_sizes take turns in one process, so a busy machine slows down all of them

The ranks are four processes on one machine, so no GPU and no network is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from ranks import KEEP_FREED_MEMORY, peak_mib, reset_peak, spawn
from step_vs_native import SentBytes
from timing import seconds_of_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_

WORLD = 4
WARMUP_STEPS = 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the length of a sequence."""

    seq: int = 2048
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 256
    vocab: int = 1024
    steps: int = 6
    sp: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True)
class Measured:
    """The bytes of one rank with one sp_size, and the seconds of its steps."""

    activations: int
    sent: int
    seconds: list[float]


def build(sizes: Sizes, sp: int) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden // sizes.heads,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        max_position_embeddings=sizes.seq,
    )
    # Every sp_size computes the head and the loss in the same way.
    return apply_ep_fsdp2(Qwen3MoeForCausalLM(config), sp_size=sp, fused_loss=False).train()


def make_batch(sizes: Sizes, sp: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() // sp)
    input_ids = torch.randint(sizes.vocab, (1, sizes.seq), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids, "use_cache": False}


@contextmanager
def saved_storages(model: nn.Module) -> Iterator[dict[int, int]]:
    """Inside the block, record the bytes of each storage that autograd saves.

    Storages of parameters, sharded or gathered, are left out.
    """
    saved: dict[int, int] = {}

    def storage(tensor: Tensor) -> torch.UntypedStorage:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()

    def pack(tensor: Tensor) -> Tensor:
        pointer = storage(tensor).data_ptr()
        if all(storage(parameter).data_ptr() != pointer for parameter in model.parameters()):
            saved[pointer] = storage(tensor).nbytes()
        # Without detach, an output that its own operator saves would keep the graph alive for ever,
        # if no backward frees the graph.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    model(**batch).loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def measure_rank(rank: int, sizes: Sizes) -> dict[int, Measured]:
    models = {sp: build(sizes, sp) for sp in sizes.sp}
    batches = {sp: make_batch(sizes, sp) for sp in sizes.sp}
    optimizers = {sp: torch.optim.AdamW(model.parameters()) for sp, model in models.items()}
    activations, sent = {}, {}
    for sp, model in models.items():
        with SentBytes(sizes.hidden) as counter:
            with saved_storages(model) as saved:
                loss = model(**batches[sp]).loss
            loss.backward()
        model.zero_grad()
        activations[sp], sent[sp] = sum(saved.values()), sum(counter.sent.values())
    seconds: dict[int, list[float]] = {sp: [] for sp in sizes.sp}
    for step in range(WARMUP_STEPS + sizes.steps):
        for sp, model in models.items():
            taken = seconds_of_step(partial(train_step, model, optimizers[sp], batches[sp]))
            if step >= WARMUP_STEPS:
                seconds[sp].append(taken)
    return {sp: Measured(activations[sp], sent[sp], seconds[sp]) for sp in sizes.sp}


def measure_memory(rank: int, sizes: Sizes, sp: int) -> float:
    """Measure the growth of the peak resident memory over three steps, in MiB."""
    model, batch = build(sizes, sp), make_batch(sizes, sp)
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    reset_peak()
    before = peak_mib()
    for _ in range(3):
        train_step(model, optimizer, batch)
    return peak_mib() - before


def report(
    sizes: Sizes, ranks: list[dict[int, Measured]], peaks: dict[int, list[float]], about: list[str]
) -> str:
    mib, first = 2**20, sizes.sp[0]
    base = ranks[0][first].activations
    lines = [
        "# One long sequence, split over 1, 2 and 4 ranks\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, {sizes.heads} heads, "
        f"top-{sizes.top_k} of {sizes.experts} experts of {sizes.intermediate}, fp32; a sequence "
        f"of {sizes.seq} tokens, {WORLD} gloo ranks of one thread each, {sizes.steps} steps\n",
        "| sp | activations, MiB | times sp, against sp 1 | peak rises by, MiB "
        "| sent by a rank, MiB | step, s | tokens/s, all ranks |",
        "|---|---|---|---|---|---|---|",
    ]
    for sp in sizes.sp:
        measured = [rank[sp] for rank in ranks]
        activations = [rank.activations / mib for rank in measured]
        shares = [rank.activations * sp / base / first for rank in measured]
        seconds = measured[0].seconds
        speeds = [WORLD // sp * sizes.seq / step_seconds for step_seconds in seconds]
        cells = [spread(activations), spread(shares), spread(peaks[sp])]
        cells += [spread([rank.sent / mib for rank in measured]), spread(seconds), spread(speeds)]
        lines.append(f"| {sp} | {' | '.join(cells)} |")
    lines.append(
        "\nMedian (min .. max), over ranks for bytes and over steps for seconds. Every figure is "
        "explained at the top of `benchmarks/sequence.py`."
    )
    return "\n".join(lines) + "\n"


def plot(sizes: Sizes, ranks: list[dict[int, Measured]], peaks: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mib = 2**20
    saved = [ranks[0][sp].activations / mib for sp in sizes.sp]
    risen = [statistics.median(peaks[sp]) for sp in sizes.sp]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(sizes.sp, saved, "o-", label="activations of a rank")
    axes.plot(sizes.sp, risen, "s-", label="rise of its peak memory in training")
    axes.plot(sizes.sp, [saved[0] / sp for sp in sizes.sp], "k:", label="1 / sp")
    axes.set(xscale="log", yscale="log", xlabel="sp_size", ylabel="MiB", xticks=sizes.sp)
    axes.set_xticks(sizes.sp, [str(sp) for sp in sizes.sp])
    axes.minorticks_off()
    axes.set_title(f"One sequence of {sizes.seq} tokens")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        if type(default) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="folder for sequence-cpu.md and its plot")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes()) if name != "sp"})
    load_before = os.getloadavg()[0]
    options = {"timeout": 900.0, "environment": KEEP_FREED_MEMORY}
    ranks = spawn(measure_rank, WORLD, sizes, **options)
    peaks = {sp: spawn(measure_memory, WORLD, sizes, sp, timeout=600.0) for sp in sizes.sp}
    about = describe_machine("benchmarks/sequence.py", load_before, WORLD)
    text = report(sizes, ranks, peaks, about)
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "sequence-cpu.md").write_text(text)
        plot(sizes, ranks, peaks, args.write / "sequence-cpu.png")


if __name__ == "__main__":
    main()
