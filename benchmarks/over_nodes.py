"""Run a benchmark's `measure(sizes)` on ranks in several network namespaces.

Each namespace acts as a node (`tests/support/namespaces.py`, which needs root and iproute2), and
`tc tbf` limits the link between the nodes. The script of the benchmark is started once per rank
with `--rank FILE`, and then calls `rank_main`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_text import describe_machine
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import namespaces
from support.agents import run_agents, torchrun

# Values of each step, by model and by the name of the figure.
Figures = dict[str, dict[str, list[float]]]


def add_options(parser: argparse.ArgumentParser, sizes: Any, page: str) -> None:
    """Add an option for each size, and the options `--write` and `--rank`."""
    for name, default in vars(sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help=f"also write {page} to this folder")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)


def run_in_turn(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    batches: Mapping[str, Mapping[str, Any]],
    steps: int,
) -> Figures:
    """Run steps of several models in turn, each on its batch. The first turn is not recorded."""
    figures: Figures = {name: {"seconds": [], "sent": [], "loss": []} for name in models}
    for turn in range(1 + steps):
        # The order within a turn alternates.
        for name in list(models)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            before, began = _read_sent_bytes(), time.perf_counter()
            loss = models[name](**batches[name]).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            seconds = time.perf_counter() - began
            if turn:
                figures[name]["seconds"].append(seconds)
                figures[name]["sent"].append((_read_sent_bytes() - before) / 2**20)
                figures[name]["loss"].append(float(loss.detach()))
    return figures


def _read_sent_bytes() -> int:
    """Return the bytes that this node's interface has sent, or 0 outside a network namespace."""
    return namespaces.sent_here() if Path("/sys/class/net", namespaces.DEVICE).exists() else 0


def rank_main(file: Path, measure: Callable[[Any], Figures], sizes_class: type) -> None:
    """Run one rank under a launcher. Rank 0 writes its figures to `file`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = measure(sizes_class(**json.loads(os.environ["SIZES"])))
    if dist.get_rank() == 0:
        file.write_text(json.dumps(figures))
    dist.destroy_process_group()


def run(
    script: str,
    sizes: Any,
    *,
    num_nodes: int,
    num_ranks: int,
    rate: str | None,
    timeout: float = 500.0,
) -> Figures:
    """Measure on `num_nodes` nodes whose link is limited to `rate`. None means no limit."""
    with (
        tempfile.TemporaryDirectory(prefix="benchmark_nodes_") as folder,
        namespaces.Nodes(num_nodes, rate=rate) as nodes,
    ):
        file = Path(folder, "figures.json")
        os.environ["SIZES"] = json.dumps(asdict(sizes))
        arguments = [script, "--rank", str(file)]
        commands = [
            torchrun(nodes, node, *arguments, ranks=num_ranks // num_nodes)
            for node in range(num_nodes)
        ]
        run_agents(nodes, commands, Path(folder), timeout=timeout)
        figures: Figures = json.loads(file.read_text())
    return figures


def main_by_rate(
    script: str,
    about: str,
    sizes: Any,
    rates: Sequence[str],
    *,
    page: str,
    ranks: int,
    measure: Callable[[Any], Figures],
    report: Callable[[Any, dict[str, Figures], list[str]], str],
) -> None:
    """Run a benchmark with one rank per node, for several limits of the links ("" is no limit).

    Args:
        about: the benchmark's docstring.
        sizes: the default sizes.
        report: formats the page `page` from the sizes, the figures by rate, and the machine.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    add_options(parser, sizes, page)
    parser.add_argument("--rates", nargs="+", default=list(rates), help="links, in tc's format")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, measure, type(sizes))
        return
    if namespaces.WHY_NOT:
        print(f"not measured: {namespaces.WHY_NOT}")
        return
    sizes = type(sizes)(**{name: getattr(args, name) for name in vars(sizes)})
    load_before = os.getloadavg()[0]
    by_rate = {
        rate: run(script, sizes, num_nodes=ranks, num_ranks=ranks, rate=rate or None)
        for rate in args.rates
    }
    text = report(
        sizes, by_rate, describe_machine(f"benchmarks/{Path(script).name}", load_before, ranks)
    )
    write(args.write, page, text)


def write(folder: Path | None, page: str, text: str) -> None:
    """Print a page, and write it to a folder if one is given."""
    print(text)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)
