"""Compare the planned memory and time of training steps with measurements on real ranks.

    python benchmarks/plan.py                              prints the tables
    python benchmarks/plan.py --write benchmarks/results   also writes them as Markdown
    python benchmarks/plan.py --calibrate rates.json       also writes the measured rates

Eight configurations run on four gloo ranks. In each configuration, every rank builds the model,
patches it, attaches adapters, shards it, runs two warm-up steps, and counts the bytes of all live
tensors in the next step, operator by operator (`hf_moe_ep/planner/count.py`). The plan counts the
same bytes in one process, on tensors without memory. It assumes that all ranks are like the first
rank (`hf_moe_ep/planner/step.py`).

    planned, evenly    the planned peak if all experts have equal loads
    planned, load      the planned peak with the loads of experts in the measured step
    measured           the peak of each rank in its step; ratios are to the largest of these peaks

Then ROUNDS rounds are timed. In each round, every configuration runs one step, and the time of the
slowest rank counts. The rates of this machine are measured in the configuration CALIBRATED
(`hf_moe_ep/planner/calibrate.py`), and give the predicted seconds of every plan. The result is
Spearman's rank correlation of predicted and measured seconds. Configurations whose measured
quartiles overlap share a rank in this correlation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmark_text import describe_machine, spread
from ranks import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from hf_moe_ep import (
    ParallelConfig,
    apply_ep_fsdp2,
    data_parallel_rank,
    expert_load,
    patch,
)
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.planner.calibrate import make_hardware, measure_rates, time_step
from hf_moe_ep.planner.config import attach_lora
from hf_moe_ep.planner.counted import count_step, make_optimizer
from hf_moe_ep.planner.seconds import StepTime, plan_step_time
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.planner.work import StepWork
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.state import STATE
from hf_moe_ep.upstream.models import add_fused_head, enable_checkpointing

WORLD = 4
ROUNDS = 7
# This configuration has every kind of communication, with messages of all sizes.
CALIBRATED = "ep 2, sp 2, two sequences"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the tokens of a sequence."""

    seq: int = 512
    hidden: int = 256
    layers: int = 6
    experts: int = 16
    top_k: int = 4
    intermediate: int = 256
    vocab: int = 2048

    def config(self) -> PreTrainedConfig:
        """Return the config of the model."""
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
    """A parallel layout, and the other options of a training step."""

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
    offload: bool = False

    def planned(
        self,
        sizes: Sizes,
        world: int = WORLD,
        load: ExpertLoad | None = None,
        *,
        like_gpu: bool = False,
    ) -> StepPlan:
        """Plan a step of this configuration for CPU ranks, or for GPUs with `like_gpu`."""
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
            offload=self.offload,
            load=load,
            like_gpu=like_gpu,
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
    """The figures of one rank in one configuration.

    Attributes:
        peaks: the peak bytes of each phase of the step.
        load: the load of the experts over all ranks.
        seconds: the times of further steps.
        rates: the rates of this machine, only for the configuration CALIBRATED.
    """

    peaks: dict[str, int]
    work: StepWork
    load: ExpertLoad
    seconds: list[float] = field(default_factory=list)
    rates: dict[str, Any] = field(default_factory=dict)
    host_peak: int = 0

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


@dataclass
class Training:
    """A model that is trained on this rank."""

    model: nn.Module
    layers: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    batch: dict[str, Any]
    offload: bool

    def step(self) -> None:
        """Run one training step."""
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_rank(
    rank: int,
    sizes: Sizes,
    configurations: Sequence[Configuration],
    rounds: int = 0,
    calibrated: str = CALIBRATED,
) -> list[Measured]:
    """Count the third step of this rank in each configuration, and time `rounds` more steps."""
    trainings = [prepare(configuration, sizes) for configuration in configurations]
    measured = [count(training) for training in trainings]
    if not rounds:
        return measured
    for configuration, training, figures in zip(configurations, trainings, measured, strict=True):
        if configuration.name == calibrated:
            figures.rates.update(measure_rates(training.model, training.step, node_size=WORLD))
    for _ in range(rounds):
        for training, figures in zip(trainings, measured, strict=True):
            figures.seconds.append(time_step(training.step, torch.device("cpu")))
    return measured


def measure(configuration: Configuration, sizes: Sizes) -> Measured:
    """Count the third step of this rank in one configuration."""
    return count(prepare(configuration, sizes))


def prepare(configuration: Configuration, sizes: Sizes) -> Training:
    """Build and shard a model, and run two steps, of which the first makes the optimizer's state.

    The weights have the dtype of the configuration. Buffers stay in fp32, as in a loaded model.
    """
    torch.manual_seed(0)
    config, dtype = sizes.config(), configuration.dtype
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    patch(model, **configuration.parallel)
    head = add_fused_head(model) if configuration.fused_head else {}
    in_fp32 = configuration.masters == "fp32"
    rank, targets = configuration.lora_rank, configuration.lora_targets
    if rank is not None:
        plan = getattr(model, STATE).plan
        model = attach_lora(model, plan, rank, targets, device="cpu", fp32=in_fp32)
    layers, offload = find_parts(model).layers, configuration.offload
    apply_ep_fsdp2(
        model,
        mp_policy=None if in_fp32 else MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None,
    ).train()
    if configuration.checkpointing:
        enable_checkpointing(model)
    optimizer = make_optimizer(configuration.optimizer, model.parameters(), on_host=offload)
    batch = make_batch(sizes, configuration.batch, data_parallel_rank(model)) | head
    training = Training(model, layers, optimizer, batch, offload)
    for _ in range(2):
        training.step()
    return training


def count(training: Training) -> Measured:
    """Run one step, and count its work and the bytes of its live tensors."""
    model = training.model
    expert_load(model, reset=True)
    counted = count_step(
        model, training.layers, training.optimizer, training.batch, offload=training.offload
    )
    load, host_peak = expert_load(model), counted.memory.host_peak
    return Measured(counted.peaks(), counted.work, load, host_peak=host_peak)


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
        "# The memory and the time of a step: planned, and counted on four ranks\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, vocabulary {sizes.vocab}; sequences of "
        f"{sizes.seq} tokens; fp32 where nothing else is said\n",
        "| configuration | measured, MiB | planned, evenly | / measured | planned, load "
        "| / measured | peak in | busiest rank / mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs = zip(configurations, plans, strict=True)
    for index, (configuration, (evenly, loaded)) in enumerate(pairs):
        ranks = [rank[index] for rank in measured]
        largest = max(rank.peak for rank in ranks)
        cells = [spread([rank.peak / 2**20 for rank in ranks])]
        for plan in (evenly, loaded):
            cells += [f"{plan.peak / 2**20:.1f}", f"{plan.peak / largest:.3f}"]
        cells += [loaded.where, f"{float(ranks[0].load.rank_max_over_mean.max()):.2f}"]
        lines.append(f"| {configuration.name} | {' | '.join(cells)} |")
    lines.append(
        "\nMedian (min .. max) over ranks; ratios are to the largest. The last column is of the "
        "layer that is worst: what a plan cannot know before a run is which experts tokens "
        "choose. Every figure is explained at the top of `benchmarks/plan.py`."
    )
    return "\n".join(lines) + "\n"


def predict(
    configurations: Sequence[Configuration],
    plans: Sequence[StepPlan],
    rates: dict[str, Any],
    sizes: Sizes,
) -> list[StepTime]:
    """Predict the time of a step of each configuration on this machine."""
    hardware = make_hardware(rates)
    return [
        plan_step_time(
            plan,
            hardware,
            micro_batches=1,
            tokens=configuration.batch * sizes.seq // configuration.parallel.get("sp_size", 1),
        )
        for configuration, plan in zip(configurations, plans, strict=True)
    ]


def list_slowest_seconds(measured: Sequence[Sequence[Measured]], index: int) -> list[float]:
    """Return the seconds of the slowest rank in each round."""
    return [max(seconds) for seconds in zip(*(rank[index].seconds for rank in measured))]


def compute_ranks(values: Sequence[Sequence[float]]) -> Tensor:
    """Compute the statistical rank of each list of measurements, which is its position by median.

    Lists whose quartiles overlap share the mean of their ranks.
    """
    quartiles = [torch.tensor(v, dtype=torch.float64).quantile(QUARTILES) for v in values]
    order = sorted(range(len(values)), key=lambda index: float(quartiles[index][1]))
    ranks = torch.empty(len(values), dtype=torch.float64)
    group: list[int] = []
    for position, index in enumerate(order):
        if group and quartiles[index][0] > max(quartiles[other][2] for other in group):
            group = []
        group.append(index)
        ranks[group] = position - (len(group) - 1) / 2
    return ranks


def compute_spearman(first: Tensor, second: Tensor) -> float:
    """Compute the correlation of two lists of statistical ranks. It is NaN for a constant list."""
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def compute_agreement(
    times: Sequence[StepTime], seconds: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Compute Spearman's correlation of predicted and measured seconds, with and without ties."""
    predicted = compute_ranks([[time.seconds] for time in times])
    medians = compute_ranks([[statistics.median(rounds)] for rounds in seconds])
    return compute_spearman(predicted, compute_ranks(seconds)), compute_spearman(predicted, medians)


def report_seconds(
    configurations: Sequence[Configuration],
    times: Sequence[StepTime],
    seconds: Sequence[Sequence[float]],
) -> str:
    parts = dict.fromkeys(name for time in times for name in time.parts)
    lines = [
        "\n## Seconds\n",
        f'Rates were measured in "{CALIBRATED}", and its own seconds with them.\n',
        f"| configuration | measured, s | predicted | / measured | {' | '.join(parts)} |",
        "|---" * (4 + len(parts)) + "|",
    ]
    for configuration, time, measured in zip(configurations, times, seconds, strict=True):
        cells = [spread(list(measured)), f"{time.seconds:.2f}"]
        cells.append(f"{time.seconds / statistics.median(measured):.2f}")
        cells += [f"{time.parts.get(name, 0.0):.3f}" for name in parts]
        lines.append(f"| {configuration.name} | {' | '.join(cells)} |")
    with_ties, without = compute_agreement(times, seconds)
    rounds = [
        compute_spearman(
            compute_ranks([[measured[i]] for measured in seconds]), compute_ranks(seconds)
        )
        for i in range(len(seconds[0]))
    ]
    lines.append(
        f"\nSpearman's correlation of predicted and measured: {with_ties:.2f} "
        f"({without:.2f} of medians, without ties). A single round and all of them: "
        f"{spread(rounds)}. Parts are seconds of the prediction; the ranks share the cores of one "
        f"machine, so no transfer overlaps computation."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="also write plan-cpu.md to this folder")
    parser.add_argument("--calibrate", type=Path, metavar="OUT", help="file for the measured rates")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    measured = spawn(measure_rank, WORLD, sizes, CONFIGURATIONS, ROUNDS, timeout=1800.0)
    loads = [figures.load for figures in measured[0]]
    plans = [
        (configuration.planned(sizes), configuration.planned(sizes, load=load))
        for configuration, load in zip(CONFIGURATIONS, loads, strict=True)
    ]
    rates = next(figures.rates for figures in measured[0] if figures.rates)
    times = predict(CONFIGURATIONS, [evenly for evenly, _ in plans], rates, sizes)
    seconds = [list_slowest_seconds(measured, index) for index in range(len(CONFIGURATIONS))]
    about = describe_machine("benchmarks/plan.py", load_before, WORLD)
    text = report(CONFIGURATIONS, plans, measured, about, sizes)
    text += report_seconds(CONFIGURATIONS, times, seconds)
    print(text)
    if args.calibrate:
        args.calibrate.write_text(json.dumps(rates, indent=2) + "\n")
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "plan-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
