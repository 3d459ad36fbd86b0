"""Measure bytes and seconds of layouts for few large experts: etp_size against FSDP2 shards.

    python benchmarks/few_experts.py

A model with 8 experts (the shape of Mixtral 8x7B, with its sizes divided by 8) and a model with 2
experts train on 4 CPU ranks. The layouts differ in how ranks hold a layer's experts:

    ep N               a rank computes whole experts. With N < 4, FSDP2 shards them over the other
                       ranks, gathers them in forward and backward, and reduces their gradients
    ep N x etp M       with N * M = 4, a rank has a part of its experts, and nothing is gathered

The figures are means over the ranks for one step:

    rows       bytes of hidden states, results and their gradients that a rank sends
    weights    bytes that a rank sends to gather experts and other parameters, and to reduce their
               gradients
    held       bytes of the experts' weights on a rank
    gathered   bytes of the experts' weights of a layer on a rank while the layer runs
    seconds    forward, backward and SGD until the slowest rank is done; layouts take turns
    CPU        CPU seconds, summed over ranks

All layouts must compute the same losses in the first two steps. Otherwise the benchmark raises an
error and prints no table.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from models import qwen3_moe
from ranks import KEEP_FREED_MEMORY, spawn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.state import patched_state

VOCAB, WORLD = 512, 4
LAYOUTS: dict[int, list[dict[str, int]]] = {
    8: [{"ep_size": 4}, {"ep_size": 2}, {"ep_size": 2, "etp_size": 2}, {"etp_size": 4}],
    2: [{"ep_size": 1}, {"ep_size": 2}, {"ep_size": 2, "etp_size": 2}, {"etp_size": 4}],
}


@dataclass(frozen=True)
class Sizes:
    hidden: int = 512
    intermediate: int = 1792
    layers: int = 1
    experts: int = 8
    top_k: int = 2
    tokens: int = 256
    steps: int = 4


class SentBytes(TorchDispatchMode):
    """Counts the bytes of floating-point values that this rank sends to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.weights = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = str(func)
        if name == "c10d.alltoall_base_.default" and args[1].is_floating_point():
            rank = dist.ProcessGroup.unbox(args[2]).rank()
            row_bytes = args[1][:1].nbytes if len(args[1]) else 0
            self.rows += row_bytes * sum(n for r, n in enumerate(args[4]) if r != rank)
        elif name == "c10d._allgather_base_.default":
            self.weights += args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
        elif name == "c10d._reduce_scatter_base_.default":
            self.weights += args[0].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Measured:
    """The figures of one layout on one rank. `losses` has the losses of the first two steps."""

    losses: list[float]
    rows: int
    weights: int
    held: int
    gathered: int
    seconds: list[float]
    cpu: list[float]


@dataclass
class _Run:
    model: Any
    optimizer: Any
    losses: list[float]
    seconds: list[float]
    cpu: list[float]

    def step(self, ids: torch.Tensor) -> None:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu_start)
        self.losses.append(loss.item())


def train_on_rank(rank: int, sizes: Sizes) -> list[Measured]:
    """Train all layouts on this rank, step by step in turn."""
    runs = []
    for layout in LAYOUTS[sizes.experts]:
        torch.manual_seed(0)
        model = apply_ep_fsdp2(qwen3_moe(sizes, VOCAB), **layout)
        # Not AdamW: its first update has the sign of the gradient, which rounding flips near zero.
        runs.append(_Run(model, torch.optim.SGD(model.parameters(), lr=0.1), [], [], []))
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB, (1, sizes.tokens), generator=generator)
    for _ in range(sizes.steps + 1):  # the first step is a warm-up
        for run in runs:
            run.step(ids)
    return [_measure(run, ids) for run in runs]


def _measure(run: _Run, ids: torch.Tensor) -> Measured:
    seconds, cpu, losses = run.seconds[1:], run.cpu[1:], run.losses[:2]
    with SentBytes() as sent:
        run.step(ids)
    meshes = patched_state(run.model).meshes
    assert meshes is not None
    held = sum(
        parameter.to_local().nbytes
        for name, parameter in run.model.named_parameters()
        if ".experts." in name
    )
    layers = len(patched_state(run.model).moe_layers)
    gathered = held // layers * meshes.ep_fsdp_size
    return Measured(losses, sent.rows, sent.weights, held, gathered, seconds, cpu)


def report(sizes: list[Sizes], machine: list[str] | None = None) -> str:
    """Measure all layouts and return the tables.

    Raises:
        AssertionError: layouts compute different losses.
    """
    lines: list[str] = []
    for each in sizes:
        ranks = spawn(train_on_rank, WORLD, each, timeout=900.0, environment=KEEP_FREED_MEMORY)
        lines += ["", f"- {each}", ""]
        lines += [
            "| layout | MB of rows | MB of weights | MB held | MB gathered | seconds "
            "| CPU seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        for number, layout in enumerate(LAYOUTS[each.experts]):
            results_of_layout = [results[number] for results in ranks]
            for results in ranks:
                for loss, first in zip(results[number].losses, results[0].losses, strict=True):
                    assert abs(loss - first) < 1e-5 * abs(first), (layout, loss, first)
            name = " x ".join(f"{key.removesuffix('_size')} {n}" for key, n in layout.items())
            cells = [
                f"{sum(getattr(r, field) for r in results_of_layout) / WORLD / 1e6:.2f}"
                for field in ("rows", "weights", "held", "gathered")
            ]
            cpu = [sum(step) for step in zip(*(r.cpu for r in results_of_layout), strict=True)]
            cells += [spread(results_of_layout[0].seconds), spread(cpu)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*(machine or []), *lines])


def main() -> None:
    load = os.getloadavg()[0]
    tables = report([Sizes(), Sizes(experts=2, top_k=1)])
    print("# Few, large experts: etp_size against FSDP2 shards\n")
    print("\n".join(describe_machine("benchmarks/few_experts.py", load, WORLD)))
    print(tables)


if __name__ == "__main__":
    main()
