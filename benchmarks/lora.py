"""Measure LoRA on experts and attention with hf_moe_ep and stock PEFT, on 1 and on 4 ranks.

    python benchmarks/lora.py                              prints the table
    python benchmarks/lora.py --write benchmarks/results   also writes it as Markdown
    python benchmarks/lora.py --experts-dtype nf4 fp8 --layers 2 --steps 3      quantised experts

Both sides have the same model, frozen base, adapters and batches. In one process, stock PEFT is
compared with `patch(model)`. On four gloo ranks, a stock model whose layers are sharded by FSDP2
without expert parallelism is compared with `apply_ep_fsdp2(model, ep_size=4)`.

    saved          bytes of the storages that autograd saves in a forward, without parameters
    peak           peak of resident memory over three training steps, minus the memory that the
                   process had before the model was built. Each side runs in its own process
    training       the same peak minus the memory that the process had before the first step, when
                   the model exists already (sharded on 4 ranks)
    step           forward, backward and AdamW, until the slowest rank is done. This is measured
                   separately from memory: both sides take turns in one process, so a busy machine
                   slows down both of them

With `--experts-dtype`, two ranks (ep_fsdp 2) hold the base in bf16, and its experts in each format:

    held           bytes of the expert matrices and their scales on both ranks, per parameter
    gathered       bytes of the units of experts that FSDP2 gathers on a rank in one step
    live peak      the largest number of bytes of live tensors after any operator of a step
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
from unittest import mock

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from peft import LoraConfig, get_peft_model
from ranks import KEEP_FREED_MEMORY, peak_mib, reset_peak, spawn
from sequence import saved_storages
from timing import seconds_of_step
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.planner.counted import count_step

WORLDS = (1, 4)
WARMUP_STEPS = 1
KINDS = ("stock", "ours")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and its adapters, and the tokens of a rank."""

    tokens: int = 512
    hidden: int = 512
    layers: int = 4
    experts: int = 64
    top_k: int = 4
    intermediate: int = 512
    vocab: int = 1024
    rank: int = 16
    steps: int = 8


@dataclass(frozen=True)
class Measured:
    """The figures of one rank, with stock PEFT or with hf_moe_ep."""

    saved: int
    seconds: list[float]


def build(sizes: Sizes, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes.hidden // 8,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    lora = LoraConfig(
        r=sizes.rank,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
    )
    return get_peft_model(Qwen3MoeForCausalLM(config).to(dtype), lora).train()


def distribute(model: nn.Module, kind: str) -> nn.Module:
    """Shard the model. In one process, patch it for "ours" and return it unchanged for "stock"."""
    if dist.get_world_size() == 1:
        return patch(model) if kind == "ours" else model
    if kind == "ours":
        return apply_ep_fsdp2(model, ep_size=dist.get_world_size())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def make_batch(sizes: Sizes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    input_ids = torch.randint(sizes.vocab, (1, sizes.tokens), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids, "use_cache": False}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_rank(rank: int, sizes: Sizes) -> dict[str, Measured]:
    models = {kind: distribute(build(sizes), kind) for kind in KINDS}
    batch = make_batch(sizes)
    optimizers = {kind: make_optimizer(model) for kind, model in models.items()}
    saved = {}
    for kind, model in models.items():
        with saved_storages(model) as storages:
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad()
        saved[kind] = sum(storages.values())
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(WARMUP_STEPS + sizes.steps):
        for kind, model in models.items():
            taken = seconds_of_step(partial(train_step, model, optimizers[kind], batch))
            if step >= WARMUP_STEPS:
                seconds[kind].append(taken)
    return {kind: Measured(saved[kind], seconds[kind]) for kind in KINDS}


def measure_memory(rank: int, sizes: Sizes, kind: str) -> tuple[float, float]:
    """Measure by how many MiB three steps raise the peak of resident memory.

    The first result is relative to the process before the model is built, the second result to the
    process with the model.
    """
    reset_peak()
    empty = peak_mib()
    model, batch = distribute(build(sizes), kind), make_batch(sizes)
    optimizer = make_optimizer(model)
    gc.collect()
    reset_peak()
    with_model = peak_mib()
    for _ in range(3):
        train_step(model, optimizer, batch)
    return peak_mib() - empty, peak_mib() - with_model


@dataclass(frozen=True)
class Held:
    """The figures of one rank with experts in one format; sizes are in bytes."""

    experts: int
    parameters: int
    gathered: int
    peak: int
    seconds: list[float]


def measure_held_on_rank(rank: int, sizes: Sizes, kinds: list[str]) -> dict[str, Held]:
    """Measure all formats, one after another. "bf16" means unquantised experts."""
    return {kind: measure_held(sizes, kind) for kind in kinds}


def measure_held(sizes: Sizes, kind: str) -> Held:
    model = build(sizes, torch.bfloat16)
    parameters = sum(p.numel() for p in list_expert_tensors(model))
    layers = find_parts(model).layers
    apply_ep_fsdp2(model, experts_dtype=None if kind == "bf16" else kind)
    experts = sum(p.to_local().untyped_storage().nbytes() for p in list_expert_tensors(model))
    batch, optimizer = make_batch(sizes), make_optimizer(model)
    train_step(model, optimizer, batch)
    with record_gathered_bytes() as gathered:
        counted = count_step(model, layers, optimizer, batch)
    step = partial(train_step, model, optimizer, batch)
    seconds = [seconds_of_step(step) for _ in range(sizes.steps)]
    return Held(experts, parameters, sum(gathered), max(counted.peaks().values()), seconds)


def list_expert_tensors(model: nn.Module) -> list:
    """List the stacked matrices of experts and their scales, without adapters."""
    names = ("gate_up_proj", "down_proj")
    named = ((name.rpartition(".")[2], p) for name, p in model.named_parameters())
    return [p for name, p in named if name.startswith(names)]


@contextmanager
def record_gathered_bytes() -> Iterator[list[int]]:
    """Inside the block, record the bytes of each all-gather of a unit of experts."""
    sizes: list[int] = []
    stock = FSDPParamGroup.unshard

    def unshard(group: FSDPParamGroup, *args: object, **kwargs: object) -> None:
        before = group._all_gather_result
        stock(group, *args, **kwargs)
        result = group._all_gather_result
        if before is None and result is not None and "experts" in (group._module_fqn or ""):
            sizes.append(result.all_gather_output.nbytes)

    with mock.patch.object(FSDPParamGroup, "unshard", unshard):
        yield sizes


def report_held(sizes: Sizes, ranks: list[dict[str, Held]], about: list[str]) -> str:
    lines = [
        "# Frozen experts as bytes, under LoRA\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, bf16, frozen; adapters of rank "
        f"{sizes.rank} on experts, q_proj and v_proj; {sizes.tokens} tokens per rank, "
        f"{sizes.steps} steps\n",
        "| experts | held, bytes per parameter | gathered per step, MiB | / bf16 | live peak, MiB "
        "| / bf16 | step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = ranks[0]["bf16"]
    for kind in ranks[0]:
        figures = [rank[kind] for rank in ranks]
        first = figures[0]
        bytes_per_parameter = sum(rank.experts for rank in figures) / first.parameters
        peak = max(rank.peak for rank in figures)
        bf16_peak = max(rank["bf16"].peak for rank in ranks)
        cells = [f"{bytes_per_parameter:.4f}", f"{first.gathered / 2**20:.1f}"]
        cells += [f"{first.gathered / plain.gathered:.3f}", f"{peak / 2**20:.1f}"]
        cells += [f"{peak / bf16_peak:.2f}", spread(first.seconds)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines.append(
        "\nBytes are of one step; seconds are the median (min .. max) over steps. Held bytes count "
        "the matrices of experts and their scales. Gathered bytes also include the adapters of "
        "experts, in bf16 for experts in bf16 and in fp32 for the others. The live peak also "
        "includes all adapters, their moments, the dense part and activations, which are the same "
        "for every format. So both shrink less than the held bytes. Every figure is explained at "
        "the top of `benchmarks/lora.py`."
    )
    return "\n".join(lines) + "\n"


def report(sizes: Sizes, measured: dict, memory: dict, about: list[str]) -> str:
    lines = [
        "# LoRA on experts and attention, against stock PEFT\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32, frozen; adapters of rank "
        f"{sizes.rank} on experts, q_proj and v_proj; {sizes.tokens} tokens per rank, "
        f"{sizes.steps} steps\n",
        "| ranks | | saved for backward, MiB | peak, MiB | training, MiB | step, s "
        "| step, ours / stock |",
        "|---|---|---|---|---|---|---|",
    ]
    for world in WORLDS:
        for kind in KINDS:
            ranks = [rank[kind] for rank in measured[world]]
            peaks, rises = zip(*memory[world, kind], strict=True)
            seconds = {name: measured[world][0][name].seconds for name in KINDS}
            ratios = [a / b for a, b in zip(seconds["ours"], seconds["stock"], strict=True)]
            cells = [spread([rank.saved / 2**20 for rank in ranks]), spread(peaks), spread(rises)]
            cells += [spread(seconds[kind]), spread(ratios) if kind == "ours" else ""]
            name = {"stock": "stock PEFT", "ours": f"hf_moe_ep, ep {world}"}[kind]
            lines.append(f"| {world} | {name} | {' | '.join(cells)} |")
        peak, rise = (
            statistics.median(m[column] for m in memory[world, "ours"])
            / statistics.median(m[column] for m in memory[world, "stock"])
            for column in (0, 1)
        )
        lines.append(f"| {world} | ours / stock | | {peak:.2f} | {rise:.2f} | | |")
    lines.append(
        "\nMedian (min .. max), over ranks for bytes and over steps for seconds. Every figure is "
        "explained at the top of `benchmarks/lora.py`."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="also write a Markdown file to this folder")
    parser.add_argument("--experts-dtype", nargs="+", choices=("nf4", "fp8"), metavar="FORMAT")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    if args.experts_dtype:
        ranks = spawn(measure_held_on_rank, 2, sizes, ["bf16", *args.experts_dtype], timeout=900.0)
        text = report_held(sizes, ranks, describe_machine("benchmarks/lora.py", load_before, 2))
        show(text, args.write, "lora-experts-dtype-cpu.md")
        return
    options = {"timeout": 900.0, "environment": KEEP_FREED_MEMORY}
    measured = {world: spawn(measure_rank, world, sizes, **options) for world in WORLDS}
    memory = {
        (world, kind): spawn(measure_memory, world, sizes, kind, timeout=600.0)
        for world in WORLDS
        for kind in KINDS
    }
    about = describe_machine("benchmarks/lora.py", load_before, max(WORLDS))
    show(report(sizes, measured, memory, about), args.write, "lora-cpu.md")


def show(text: str, folder: Path | None, name: str) -> None:
    print(text)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
