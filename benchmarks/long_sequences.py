"""Plan the peak memory of a Qwen3.5-MoE over the length of a sequence, with sp_size 1, 2, 4 and 8.

    python benchmarks/long_sequences.py                              prints both tables
    python benchmarks/long_sequences.py --write benchmarks/results   also writes them and a plot

The planned model has the sizes of transformers' default `Qwen3_5MoeTextConfig`, but only one period
of its layers (three delta nets and one attention layer) and a small vocabulary, so that the figures
show only the layers. Eight ranks share one sequence or train on several sequences. The figure is
the peak of activations and temporary tensors of a rank in the forward and backward of a training
step in bf16, without parameters and gradients, as `hf-moe-ep plan` counts it on fake tensors. The
recurrence is transformers' plain PyTorch code. The kernel of flash-linear-attention needs less
memory.

As a check, a small model with the same kinds of layers is planned, and measured on four CPU ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan
import torch
from benchmark_text import describe_machine
from ranks import spawn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.counted import OPTIMIZER
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step

KIND = "activations, logits, transients"
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
VOCAB = 512
SP_SIZES = (1, 2, 4, 8)
WORLD = 4


def make_qwen3_5_config(**fields: Any) -> PreTrainedConfig:
    """Build the config of one period of layers of a Qwen3.5-MoE with a small vocabulary."""
    config: PreTrainedConfig = CONFIG_MAPPING["qwen3_5_moe_text"](
        vocab_size=VOCAB, num_hidden_layers=len(PERIOD), layer_types=PERIOD, **fields
    )
    return config


@dataclass(frozen=True)
class Small(plan.Sizes):
    """The sizes of the model that is measured."""

    seq: int = 512
    vocab: int = VOCAB

    def config(self) -> PreTrainedConfig:
        return make_qwen3_5_config(
            hidden_size=128,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=8,
            linear_num_value_heads=8,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
        )


SMALL_LAYOUTS = tuple(
    plan.Configuration(f"sp {sp}", {"sp_size": sp}) for sp in SP_SIZES if sp <= WORLD
)


def plan_lengths(lengths: Sequence[int]) -> dict[int, list[StepPlan]]:
    """Plan a step for each sp_size and length."""
    config = make_qwen3_5_config()
    return {
        sp: [
            plan_step(
                config,
                ParallelConfig(ep_size=8, sp_size=sp),
                world_size=max(SP_SIZES),
                batch=Batch(seq),
                all_layers=True,
            )
            for seq in lengths
        ]
        for sp in SP_SIZES
    }


def find_peak_activations(step: StepPlan) -> int:
    """Return the peak of activations and temporary tensors in forward and backward, in bytes."""
    return max(parts.get(KIND, 0) for name, parts in step.made_of.items() if name != OPTIMIZER)


def compare() -> list[tuple[str, int, int]]:
    """Plan and measure the small model. Returns (layout, planned peak, largest measured peak).

    The plan gets the load of the experts in the measured step.
    """
    measured = spawn(plan.measure_rank, WORLD, Small(), SMALL_LAYOUTS, timeout=600.0)
    return [
        (
            layout.name,
            layout.planned(Small(), load=measured[0][index].load).peak,
            max(rank[index].peak for rank in measured),
        )
        for index, layout in enumerate(SMALL_LAYOUTS)
    ]


def report(
    lengths: Sequence[int],
    planned: dict[int, list[StepPlan]],
    compared: list[tuple[str, int, int]],
    about: list[str],
) -> str:
    lines = [
        "# The memory of long sequences, planned for a Qwen3.5-MoE\n",
        *about,
        "- planned: one period of layers (three delta nets, one attention), 8 GPUs, ep_size 8, "
        "bf16, one sequence per data rank; peak of activations and temporaries of a rank, GiB\n",
        f"| tokens | {' | '.join(f'sp {sp}' for sp in planned)} | sp 8 / sp 1 |",
        f"|---|{'---|' * (len(planned) + 1)}",
    ]
    for index, seq in enumerate(lengths):
        sizes = [find_peak_activations(plans[index]) for plans in planned.values()]
        cells = [f"{size / 2**30:.2f}" for size in sizes]
        lines.append(f"| {seq} | {' | '.join(cells)} | {sizes[-1] / sizes[0]:.2f} |")
    if not compared:
        return "\n".join(lines) + "\n"
    lines += [
        "\nA small model on 4 CPU ranks: peak of all tensors of a rank, MiB.\n",
        "| layout | planned | measured | planned / measured |",
        "|---|---|---|---|",
    ]
    for name, size, real in compared:
        lines.append(f"| {name} | {size / 2**20:.1f} | {real / 2**20:.1f} | {size / real:.3f} |")
    lines.append("\nEvery figure is explained at the top of `benchmarks/long_sequences.py`.")
    return "\n".join(lines) + "\n"


def draw(lengths: Sequence[int], planned: dict[int, list[StepPlan]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for sp, plans in planned.items():
        sizes = [find_peak_activations(step) / 2**30 for step in plans]
        axes.plot(lengths, sizes, "o-", label=f"sp_size {sp}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="GiB per rank")
    axes.set_xticks(lengths, [f"{seq // 1024}k" for seq in lengths])
    axes.minorticks_off()
    axes.set_title("Activations of four layers of a Qwen3.5-MoE, planned")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--planned-only", action="store_true", help="leave out the small model")
    parser.add_argument("--write", type=Path, help="folder for long-sequences-cpu.md and its plot")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    compared = [] if args.planned_only else compare()
    planned = plan_lengths(args.lengths)
    about = describe_machine("benchmarks/long_sequences.py", load_before, WORLD)
    text = report(args.lengths, planned, compared, about)
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "long-sequences-cpu.md").write_text(text)
        draw(args.lengths, planned, args.write / "long-sequences-cpu.png")


if __name__ == "__main__":
    main()
