"""Time training steps with one busy rank, before and after `balance_experts`, on 4 ranks.

    python benchmarks/placement.py                             prints the table
    python benchmarks/placement.py --write benchmarks/results  also writes placement-cpu.md

Two Qwen3-MoE models with the same weights run on the same ranks, with ep 4, 2 layers of 32 experts
and top-4. The routes of all tokens are drawn once and replayed in each step. Three of four chosen
experts are on the first rank. The experts of one model stay in hub order, and `balance_experts`
moves the experts of the other model. The steps of both models (forward, backward, AdamW) take
turns, and each pair of steps gives one ratio. The losses of each pair must agree to 1e-5 in fp32.
Otherwise the benchmark raises an error.

    busiest rank    (token, expert) pairs of the busiest rank / mean over ranks
    wall            seconds until the last rank is done
    own work        CPU seconds of the rank that computes most. A waiting rank uses no CPU time. If
                    ranks share a core, `wall` includes the work of other ranks on this core, and
                    differs less between the two models than on separate cores
    moving          seconds of `balance_experts`, and the largest number of bytes that a rank sends
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row, spread
from ranks import KEEP_FREED_MEMORY, spawn
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import RoutingReplay, apply_ep_fsdp2, balance_experts, expert_load
from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.routing.routes import Routes

WORLD, EXPERTS, TOP_K, LAYERS, VOCAB = 4, 32, 4, 2, 512
# A busy expert is 11 times as likely to be drawn as another expert. A token draws 4 different
# experts, of which 3 are busy on average.
BUSY_LIKELIHOOD = 11
# Targets of the balanced model: the load of the busiest rank / mean, and the ratio of times
# balanced / hub order.
TARGET_LOAD, TARGET_RATIO = 1.15, 0.8
LOSS_LIMIT = 1e-5
# The two models that are compared, named by the placement of their experts.
SIDES = ("hub order", "balanced")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run: tokens per rank, widths of the models, and number of pairs of steps."""

    tokens: int = 2048
    hidden: int = 256
    expert: int = 512
    pairs: int = 9


@dataclass(frozen=True)
class Measured:
    """The figures of one rank.

    Attributes:
        load: the load of the busiest rank / mean, for each of SIDES.
        wall, own: the wall-clock and CPU seconds of every timed step, for each of SIDES.
        error: the largest relative difference between the two losses of a pair of steps.
    """

    load: dict[str, float]
    wall: dict[str, list[float]]
    own: dict[str, list[float]]
    error: float
    move_seconds: float
    moved_bytes: int


def build(sizes: Sizes) -> nn.Module:
    """Build a model with the same weights on every rank."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden,
        moe_intermediate_size=sizes.expert,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes.hidden // 4,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).train()


def draw_routes(tokens: int, rank: int) -> Routes:
    """Draw the experts of a rank's tokens. The experts of the first rank are busy."""
    likelihood_E = torch.ones(EXPERTS)
    likelihood_E[: EXPERTS // WORLD] = BUSY_LIKELIHOOD
    generator = torch.Generator().manual_seed(rank)
    ids = torch.multinomial(likelihood_E.expand(tokens * LAYERS, -1), TOP_K, generator=generator)
    return Routes(ids.view(1, tokens, LAYERS, TOP_K), tuple(range(LAYERS)))


@contextmanager
def count_sent_bytes() -> Iterator[list[int]]:
    """Inside the block, count the bytes that `balance_experts` sends to other ranks."""
    sent: list[int] = []

    def start(received: Tensor, rows: Tensor, **options: Any) -> Any:
        num_local = options["send_counts"][dist.get_rank(options["group"])]
        sent.append((len(rows) - num_local) * rows.shape[1])
        return start_all_to_all(received, rows, **options)

    with mock.patch("hf_moe_ep.placement.move.start_all_to_all", start):
        yield sent


def measure(rank: int, sizes: Sizes) -> Measured:
    """Run and time all pairs of steps on one rank."""
    routes = draw_routes(sizes.tokens, rank)
    torch.manual_seed(rank)
    ids = torch.randint(VOCAB, (1, sizes.tokens))
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for side in SIDES:
        models[side] = build(sizes)
        apply_ep_fsdp2(models[side], ep_size=WORLD)
        optimizers[side] = torch.optim.AdamW(models[side].parameters(), lr=1e-4)
        step(models[side], optimizers[side], ids, routes)
    model, load = models["balanced"], expert_load(models["balanced"])
    dist.barrier()
    began = time.perf_counter()
    with count_sent_bytes() as sent:
        load_after = balance_experts(model, optimizers["balanced"], load)
    dist.barrier()
    move_seconds = time.perf_counter() - began
    loads = (load, load_after)
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    own: dict[str, list[float]] = {side: [] for side in SIDES}
    error = 0.0
    for turn in range(sizes.pairs + 1):
        losses = {}
        for side in SIDES if turn % 2 else SIDES[::-1]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            losses[side] = step(models[side], optimizers[side], ids, routes)
            cpu_seconds = time.process_time() - cpu
            dist.barrier()
            if turn:  # the first turn is a warm-up
                wall[side].append(time.perf_counter() - began)
                own[side].append(cpu_seconds)
        hub, balanced = (losses[side] for side in SIDES)
        error = max(error, abs(hub - balanced) / abs(hub))
    if error > LOSS_LIMIT:
        raise AssertionError(
            f"the losses of both models differ by {error:.1e}, more than the allowed "
            f"{LOSS_LIMIT:.0e}"
        )
    busiest = {
        side: float(load.rank_max_over_mean.max()) for side, load in zip(SIDES, loads, strict=True)
    }
    return Measured(busiest, wall, own, error, move_seconds, sum(sent))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, routes: Routes) -> float:
    """Run one training step. Returns its loss."""
    optimizer.zero_grad()
    with RoutingReplay(model).replay(routes, strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def find_busiest_seconds(ranks: list[Measured], side: str) -> list[float]:
    """Return the CPU seconds of each step on the rank that used most CPU time."""
    return [max(turn) for turn in zip(*(rank.own[side] for rank in ranks), strict=True)]


def find_slowest_seconds(ranks: list[Measured], side: str) -> list[float]:
    """Return the seconds of each step until the last rank was done."""
    return [max(turn) for turn in zip(*(rank.wall[side] for rank in ranks), strict=True)]


def report(ranks: list[Measured], sizes: Sizes) -> str:
    """Format the table, and for each target a line that says whether the run reaches it."""
    hub, balanced = SIDES
    load = ranks[0].load
    times = {
        "wall, seconds": [find_slowest_seconds(ranks, side) for side in SIDES],
        "own work, CPU seconds": [find_busiest_seconds(ranks, side) for side in SIDES],
    }
    ratios = {name: [b / h for h, b in zip(*sides, strict=True)] for name, sides in times.items()}
    most_mib = max(rank.moved_bytes for rank in ranks) / 2**20
    lines = [
        f"{WORLD} ranks, ep {WORLD}, {sizes.tokens} tokens each, hidden {sizes.hidden}, experts "
        f"{sizes.expert} wide, fp32; {sizes.pairs} pairs of steps. Each pair gives one ratio.",
        "",
        "| | balanced | hub order | balanced / hub order |",
        "|---|---|---|---|",
        f"| busiest rank over the mean | {load[balanced]:.3f} | {load[hub]:.2f} | "
        f"{load[balanced] / load[hub]:.2f} |",
        *(f"| {format_row(name, sides[1], sides[0])} |" for name, sides in times.items()),
        "",
        f"balance_experts ran once, for {max(rank.move_seconds for rank in ranks):.2f} s. A rank "
        f"sent at most {most_mib:.1f} MiB, which include AdamW's moments. Losses differ by at most "
        f"{max(rank.error for rank in ranks):.0e}.",
        "",
        f"Target: balanced, the busiest rank has at most {TARGET_LOAD} times the mean load: "
        f"{'reached' if load[balanced] <= TARGET_LOAD else 'NOT reached'}.",
    ]
    for name, ratios_of_pairs in ratios.items():
        is_reached = statistics.median(ratios_of_pairs) <= TARGET_RATIO
        lines.append(
            f"Target: {name}, balanced / hub order at most {TARGET_RATIO}: "
            f"{spread(ratios_of_pairs)}, {'reached' if is_reached else 'NOT reached'}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="folder for placement-cpu.md")
    parser.add_argument("--pairs", type=int, default=Sizes.pairs)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    sizes = Sizes(pairs=options.pairs)
    ranks = spawn(measure, WORLD, sizes, timeout=1200, environment=KEEP_FREED_MEMORY)
    text = "\n".join(
        [
            "# A step with one busy rank, before and after balance_experts",
            "",
            *describe_machine("benchmarks/placement.py", load_before, WORLD),
            "",
            report(ranks, sizes),
        ]
    )
    print(text)
    if options.write:
        (options.write / "placement-cpu.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
