"""What a plan says of a training step's memory, against what real ranks count in theirs.

    python benchmarks/plan.py                              the table, to the terminal
    python benchmarks/plan.py --write benchmarks/results   also as Markdown

Eight configurations on four gloo ranks. Each rank builds the model, patches it, attaches adapters,
shards, makes two steps to warm up and counts the next one: the bytes of all tensors that are alive,
operator by operator (`hf_moe_ep/tools/tensor_memory.py`). The plan counts the same in one process,
on tensors without memory, with every rank like the first (`hf_moe_ep/tools/step_plan.py`).

    planned, evenly    the peak of the plan, every expert chosen as often
    planned, load      the same with the load of experts of the very step that was measured
    measured           the peak of each rank's step; ratios are to the rank with the most
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from figures import setting, spread
from ranks import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from hf_moe_ep import (
    ParallelConfig,
    apply_ep_fsdp2,
    data_parallel_rank,
    expert_load,
    patch,
)
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.state import STATE
from hf_moe_ep.tools.published_models import attach_lora
from hf_moe_ep.tools.step_plan import (
    Batch,
    StepPlan,
    count_step,
    make_optimizer,
    plan_step,
)
from hf_moe_ep.tools.step_work import StepWork
from hf_moe_ep.upstream.models import add_fused_head, checkpoint_layers

WORLD = 4


@dataclass(frozen=True)
class Sizes:
    """The model, and the tokens of a sequence."""

    seq: int = 512
    hidden: int = 256
    layers: int = 6
    experts: int = 16
    top_k: int = 4
    intermediate: int = 256
    vocab: int = 2048

    def config(self) -> PreTrainedConfig:
        """The config of the model."""
        return Qwen3MoeConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=self.hidden // 8,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            max_position_embeddings=self.seq,
            tie_word_embeddings=False,
        )


@dataclass(frozen=True)
class Configuration:
    """One layout with what is trained on it."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    batch: int = 1
    lora_rank: int | None = None
    lora_targets: str = "both"
    masters: str = "fp32"
    fused_head: bool = False
    optimizer: str = "adamw"

    def planned(self, sizes: Sizes, world: int = WORLD, load: ExpertLoad | None = None) -> StepPlan:
        """Plan it, as on a CPU."""
        return plan_step(
            sizes.config(),
            ParallelConfig(**self.parallel),
            world_size=world,
            batch=Batch(sizes.seq, self.batch, self.checkpointing, fused_head=self.fused_head),
            dtype=self.dtype,
            masters=self.masters,
            optimizer=self.optimizer,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
            load=load,
            like_gpu=False,
        )


CONFIGURATIONS = (
    Configuration("ep 1"),
    Configuration("ep 4", {"ep_size": 4}),
    Configuration("ep 2, sp 2, two sequences", {"ep_size": 2, "sp_size": 2}, batch=2),
    Configuration("ep 4, checkpointing", {"ep_size": 4}, checkpointing=True, batch=2),
    Configuration("ep 4, 4 chunks", {"ep_size": 4, "dispatch_chunks": 4}, batch=2),
    Configuration("ep 2, replicas, bf16", {"ep_size": 2, "dp_replicate_size": 2}, torch.bfloat16),
    Configuration("ep 4, LoRA", {"ep_size": 4}, torch.bfloat16, batch=2, lora_rank=8),
    Configuration(
        "ep 2, LoRA on nf4, checkpointing",
        {"ep_size": 2, "experts_dtype": "nf4"},
        torch.bfloat16,
        checkpointing=True,
        batch=2,
        lora_rank=8,
        lora_targets="attention",
        optimizer="adamw_fused",
    ),
)


@dataclass(frozen=True)
class Measured:
    """One rank's step: its peaks by stretch, its work, and the load of experts over all ranks."""

    peaks: dict[str, int]
    work: StepWork
    load: ExpertLoad

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def measure_rank(
    rank: int, sizes: Sizes, configurations: Sequence[Configuration]
) -> list[Measured]:
    """One rank's third step in each configuration."""
    return [measure(one, sizes) for one in configurations]


def measure(one: Configuration, sizes: Sizes) -> Measured:
    torch.manual_seed(0)
    # Buffers stay in fp32, as a model is loaded.
    model: nn.Module = AutoModelForCausalLM.from_config(sizes.config(), dtype=one.dtype)
    patch(model, **one.parallel)
    head = add_fused_head(model) if one.fused_head else {}
    in_fp32 = one.masters == "fp32"
    if one.lora_rank is not None:
        plan = getattr(model, STATE).plan
        model = attach_lora(
            model, plan, one.lora_rank, one.lora_targets, device="cpu", fp32=in_fp32
        )
    layers = find_parts(model).layers
    apply_ep_fsdp2(model, mp_policy=None if in_fp32 else MixedPrecisionPolicy()).train()
    if one.checkpointing:
        checkpoint_layers(model)
    optimizer = make_optimizer(one.optimizer, model.parameters())
    batch = make_batch(sizes, one.batch, data_parallel_rank(model)) | head
    # Two: the first step of an optimizer is another one.
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expert_load(model, reset=True)
    counted = count_step(model, layers, optimizer, batch)
    return Measured(counted.peaks(), counted.work, expert_load(model))


def make_batch(sizes: Sizes, batch: int, data_rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(data_rank)
    ids: Tensor = torch.randint(sizes.vocab, (batch, sizes.seq), generator=generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def report(
    configurations: Sequence[Configuration],
    plans: Sequence[tuple[StepPlan, StepPlan]],
    measured: Sequence[Sequence[Measured]],
    about: Sequence[str],
    sizes: Sizes,
) -> str:
    lines = [
        "# The memory of a step: planned, and counted on four ranks\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, vocabulary {sizes.vocab}; sequences of "
        f"{sizes.seq} tokens; fp32 where nothing else is said\n",
        "| configuration | measured, MiB | planned, evenly | / measured | planned, load "
        "| / measured | peak in | busiest rank / mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index, (one, (evenly, loaded)) in enumerate(zip(configurations, plans, strict=True)):
        ranks = [rank[index] for rank in measured]
        most = max(rank.peak for rank in ranks)
        cells = [spread([rank.peak / 2**20 for rank in ranks])]
        for plan in (evenly, loaded):
            cells += [f"{plan.peak / 2**20:.1f}", f"{plan.peak / most:.3f}"]
        cells += [loaded.where, f"{float(ranks[0].load.rank_max_over_mean.max()):.2f}"]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    lines.append(
        "\nMedian (min .. max) over ranks; ratios are to the largest. The last column is of the "
        "layer that is worst: what a plan cannot know before a run is which experts tokens "
        "choose. Every figure is explained at the top of `benchmarks/plan.py`."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="also write plan-cpu.md there")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    measured = spawn(measure_rank, WORLD, sizes, CONFIGURATIONS, timeout=1800.0)
    loads = [one.load for one in measured[0]]
    plans = [
        (one.planned(sizes), one.planned(sizes, load=load))
        for one, load in zip(CONFIGURATIONS, loads, strict=True)
    ]
    about = setting("benchmarks/plan.py", load_before, WORLD)
    text = report(CONFIGURATIONS, plans, measured, about, sizes)
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "plan-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
