"""Time training steps on CPU ranks with one worker thread per gloo group, and with torch's two.

    python benchmarks/gloo_workers.py

`upstream/gloo.py` explains why this package creates its groups with one worker. Both sides train
the same model on the same batch, in separate processes, and take turns. With `dispatch_chunks=2`,
two all-to-alls of rows overlap, because one worker can be slower only if collectives of one group
overlap.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import torch
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from ranks import spawn

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks import mesh

WORLD = 2
VOCAB = 512


@dataclass(frozen=True)
class Sizes:
    hidden: int = 256
    intermediate: int = 128
    layers: int = 4
    experts: int = 16
    top_k: int = 4
    tokens: int = 512
    steps: int = 10
    turns: int = 5


def train_and_time(rank: int, workers: int, sizes: Sizes) -> tuple[float, float, int]:
    """Train on this rank. Returns (median seconds of a step, last loss, workers of the group)."""
    stock = patch.object(mesh, "one_worker_thread", contextlib.nullcontext)
    with stock if workers == 2 else contextlib.nullcontext():
        torch.manual_seed(0)
        model = qwen3_moe(sizes, VOCAB)
        apply_ep_fsdp2(model, ep_size=WORLD, dispatch_chunks=2)
    group = model._hf_moe_ep.meshes.ep.get_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB, (1, sizes.tokens), generator=generator)
    seconds = []
    for _ in range(sizes.steps + 2):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    num_workers = group._get_backend(torch.device("cpu")).options._threads
    return median(seconds[2:]), loss.item(), num_workers


def measure(sizes: Sizes) -> dict[int, list[float]]:
    """Measure the seconds of a step by the number of workers, one value per turn."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    losses = set()
    for _ in range(sizes.turns):
        for workers in seconds:
            ranks = spawn(train_and_time, WORLD, workers, sizes, timeout=300.0)
            assert {num_workers for _, _, num_workers in ranks} == {workers}
            losses.add(tuple(loss for _, loss, _ in ranks))
            seconds[workers].append(max(rank_seconds for rank_seconds, _, _ in ranks))
    assert len(losses) == 1, f"both sides must have the same losses, but they are {losses}"
    return seconds


def report(sizes: Sizes, seconds: dict[int, list[float]], machine: list[str]) -> str:
    lines = [
        *machine,
        f"- {sizes}",
        "",
        "| | one worker | two workers | one / two |",
        "|---|---|---|---|",
        f"| {format_row('seconds of a step', seconds[1], seconds[2])} |",
    ]
    return "\n".join(lines)


def main() -> None:
    sizes, load = Sizes(), os.getloadavg()[0]
    seconds = measure(sizes)
    print(report(sizes, seconds, describe_machine("benchmarks/gloo_workers.py", load, WORLD)))


if __name__ == "__main__":
    main()
