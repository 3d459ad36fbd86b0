"""A training step with one busy rank, before and after `balance_experts`, on 4 ranks.

    python benchmarks/placement.py                             the table, to the terminal
    python benchmarks/placement.py --write benchmarks/results  and as placement-cpu.md

Two Qwen3-MoE models of the same values on the same ranks, ep 4, 2 layers of 32 experts, top-4. The
routes of all tokens are drawn once and replayed in each step: three of four choose experts of the
first rank. One model lies in hub order, the other was balanced by its `expert_load`. Their steps
(forward, backward, AdamW) take turns, and each pair gives one ratio. Losses of each pair must agree
to 1e-5 in fp32, or the benchmark raises.

    busiest rank    (token, expert) pairs of the busiest rank over the mean: what the bound is of
    wall            seconds until the last rank is done
    own work        CPU seconds of the rank that had most. Ranks that share a core wait for each
                    other's work, so wall shows less of the difference than ranks of their own
                    would; where a rank waits it takes no CPU
    to move         seconds of the one `balance_experts`, and the bytes that a rank sent at most
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
from figures import row, setting, spread
from ranks import KEEP_FREED_MEMORY, spawn
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import RoutingReplay, apply_ep_fsdp2, balance_experts, expert_load
from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.routing.routes import Routes

WORLD, EXPERTS, TOP_K, LAYERS, VOCAB = 4, 32, 4, 2, 512
BUSY = 11  # times as likely as the others: 3 of 4 choices of 4 without replacement
TARGET_LOAD, TARGET_STEP = 1.15, 0.8
LOSSES = 1e-5
SIDES = ("hub order", "balanced")


@dataclass(frozen=True)
class Sizes:
    """Tokens are those of each rank."""

    tokens: int = 2048
    hidden: int = 256
    expert: int = 512
    pairs: int = 9


@dataclass(frozen=True)
class Measured:
    """What one rank measured; seconds by side, in turns."""

    load: dict[str, float]
    wall: dict[str, list[float]]
    own: dict[str, list[float]]
    error: float
    move_seconds: float
    moved_bytes: int


def build(sizes: Sizes) -> nn.Module:
    """Make a model of the same values on every rank."""
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
    """Draw the experts of a rank's tokens: those of the first rank of four are busy."""
    likelihood_E = torch.ones(EXPERTS)
    likelihood_E[: EXPERTS // WORLD] = BUSY
    drawn = torch.Generator().manual_seed(rank)
    ids = torch.multinomial(likelihood_E.expand(tokens * LAYERS, -1), TOP_K, generator=drawn)
    return Routes(ids.view(1, tokens, LAYERS, TOP_K), tuple(range(LAYERS)))


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Count what `balance_experts` sends to other ranks."""
    sent: list[int] = []

    def start(received: Tensor, rows: Tensor, **options: Any) -> Any:
        here = options["send_counts"][dist.get_rank(options["group"])]
        sent.append((len(rows) - here) * rows.shape[1])
        return start_all_to_all(received, rows, **options)

    with mock.patch("hf_moe_ep.placement.move.start_all_to_all", start):
        yield sent


def measure(rank: int, sizes: Sizes) -> Measured:
    """Run the pairs of steps on one rank."""
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
    with counting_bytes() as sent:
        reached = balance_experts(model, optimizers["balanced"], load)
    dist.barrier()
    move_seconds = time.perf_counter() - began
    loads = (load, reached)
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    own: dict[str, list[float]] = {side: [] for side in SIDES}
    error = 0.0
    for turn in range(sizes.pairs + 1):
        losses = {}
        for side in SIDES if turn % 2 else SIDES[::-1]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            losses[side] = step(models[side], optimizers[side], ids, routes)
            mine = time.process_time() - cpu
            dist.barrier()
            if turn:  # the first one warms up
                wall[side].append(time.perf_counter() - began)
                own[side].append(mine)
        hub, balanced = (losses[side] for side in SIDES)
        error = max(error, abs(hub - balanced) / abs(hub))
    if error > LOSSES:
        raise AssertionError(f"losses differ by {error:.1e}, allowed are {LOSSES:.0e}")
    busiest = {
        side: float(one.rank_max_over_mean.max()) for side, one in zip(SIDES, loads, strict=True)
    }
    return Measured(busiest, wall, own, error, move_seconds, sum(sent))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, routes: Routes) -> float:
    """Take a step; returns its loss."""
    optimizer.zero_grad()
    with RoutingReplay(model).replay(routes, strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def busiest_rank(found: list[Measured], side: str) -> list[float]:
    """Return the CPU seconds of the rank that had most, turn by turn."""
    return [max(turn) for turn in zip(*(one.own[side] for one in found), strict=True)]


def slowest_rank(found: list[Measured], side: str) -> list[float]:
    """Return the seconds until the last rank was done, turn by turn."""
    return [max(turn) for turn in zip(*(one.wall[side] for one in found), strict=True)]


def report(found: list[Measured], sizes: Sizes) -> str:
    """Write the table, and whether it is what was aimed at."""
    hub, balanced = SIDES
    load = found[0].load
    times = {
        "wall, seconds": [slowest_rank(found, side) for side in SIDES],
        "own work, CPU seconds": [busiest_rank(found, side) for side in SIDES],
    }
    ratios = {name: [b / h for h, b in zip(*sides, strict=True)] for name, sides in times.items()}
    most = max(one.moved_bytes for one in found) / 2**20
    lines = [
        f"{WORLD} ranks, ep {WORLD}, {sizes.tokens} tokens each, hidden {sizes.hidden}, experts "
        f"{sizes.expert} wide, fp32; {sizes.pairs} pairs, the ratio that of each pair.",
        "",
        "| | balanced | hub order | balanced / hub order |",
        "|---|---|---|---|",
        f"| busiest rank over the mean | {load[balanced]:.3f} | {load[hub]:.2f} | "
        f"{load[balanced] / load[hub]:.2f} |",
        *(f"| {row(name, sides[1], sides[0])} |" for name, sides in times.items()),
        "",
        f"To move: {max(one.move_seconds for one in found):.2f} s, at most {most:.1f} MiB from a "
        f"rank, AdamW's moments among them; once. Losses differ by at most "
        f"{max(one.error for one in found):.0e}.",
        "",
        f"The busiest rank is {'at most' if load[balanced] <= TARGET_LOAD else 'NOT at most'} "
        f"{TARGET_LOAD} of the mean.",
    ]
    for name, of_pairs in ratios.items():
        is_less = statistics.median(of_pairs) <= TARGET_STEP
        lines.append(
            f"{name.capitalize()}: {spread(of_pairs)} of hub order, "
            f"{'at most' if is_less else 'NOT at most'} {TARGET_STEP}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="folder for placement-cpu.md")
    parser.add_argument("--pairs", type=int, default=Sizes.pairs)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    sizes = Sizes(pairs=options.pairs)
    found = spawn(measure, WORLD, sizes, timeout=1200, environment=KEEP_FREED_MEMORY)
    text = "\n".join(
        [
            "# A step with one busy rank, before and after balance_experts",
            "",
            *setting("benchmarks/placement.py", load_before, WORLD),
            "",
            report(found, sizes),
        ]
    )
    print(text)
    if options.write:
        (options.write / "placement-cpu.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
