"""Time a stock Trainer script in one process, and the same script with `patch(model)` added.

    python benchmarks/trainer_one_process.py                             prints the table
    python benchmarks/trainer_one_process.py --write benchmarks/results  also writes it

Both scripts train the same Qwen3-MoE from the same seed on the same batches. They run in new
processes in turn (stock, patched, patched, stock, ...). The logged losses and gradient norms of all
steps must agree to 1e-5. Otherwise the benchmark raises an error and prints no table.

    step           time from the end of one optimizer step to the end of the next step; median of a
                   process, without the first two steps
    CPU seconds    CPU time of the same steps, which a busy machine disturbs least
    peak           peak of the resident memory of the process
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_moe_ep import patch

SIDES = ("stock", "patched")
TOLERANCE = 1e-5
WARMUP_STEPS = 2
VOCAB = 1024
SIZES = {
    "hidden": 512,
    "experts": 64,
    "top_k": 8,
    "intermediate": 256,
    "layers": 2,
    "batch": 4,
    "seq": 256,
    "steps": 10,
}


class StepTimes(TrainerCallback):
    """Records the wall-clock time and the CPU time of the process at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


def train(side: str, sizes: argparse.Namespace) -> dict[str, Any]:
    """Run the user's script, in which only the line with `patch` is not stock."""
    set_seed(0)
    model = qwen3_moe(sizes, VOCAB)
    if side == "patched":
        patch(model)
    tokens = torch.randint(VOCAB, (sizes.steps * sizes.batch, sizes.seq))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=sizes.batch,
            num_train_epochs=1,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"input_ids": ids, "labels": ids} for ids in tokens]
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[times])
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    seconds, cpu_seconds = (
        statistics.median(after - before for before, after in itertools.pairwise(ends))
        for ends in zip(*times.ends[WARMUP_STEPS - 1 :], strict=True)
    )
    return {
        "loss": [float(entry["loss"]) for entry in history],
        "grad_norm": [float(entry["grad_norm"]) for entry in history],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def check_equal(results: dict[str, dict[str, Any]]) -> float:
    """Return the largest relative difference of the logged values. Raise if above TOLERANCE."""
    worst = 0.0
    for key in ("loss", "grad_norm"):
        pairs = zip(*(results[side][key] for side in SIDES), strict=True)
        for step, (stock, patched) in enumerate(pairs):
            error = abs(patched - stock) / abs(stock)
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"step {step}: {key} is {patched} with patch() and {stock} without, a relative "
                    f"difference of {error:.1e} (allowed {TOLERANCE:.0e})"
                )
            worst = max(worst, error)
    return worst


def measure(options: list[str], pairs: int, timeout: float) -> list[dict[str, dict[str, Any]]]:
    """Run `pairs` pairs of processes. Returns the results of each pair by side."""
    results = []
    for index in range(pairs):
        pair = {}
        for side in SIDES if index % 2 == 0 else SIDES[::-1]:
            command = [sys.executable, __file__, *options, "--side", side]
            out = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout, check=True)
            pair[side] = json.loads(out.stdout.splitlines()[-1])
            print(f"pair {index + 1} of {pairs}, {side}: {pair[side]['seconds']:.3f} s", flush=True)
        results.append(pair)
    return results


def report(results: list[dict[str, dict[str, Any]]], sizes: argparse.Namespace) -> str:
    worst = max(check_equal(pair) for pair in results)

    def cells(name: str, key: str) -> str:
        columns = ([pair[side][key] for pair in results] for side in reversed(SIDES))
        return f"| {format_row(name, *columns)} |"

    return "\n".join(
        [
            f"Qwen3-MoE, fp32, one process: hidden {sizes.hidden}, top-{sizes.top_k} of "
            f"{sizes.experts} experts of {sizes.intermediate}, {sizes.layers} layers, "
            f"{sizes.batch} x {sizes.seq} tokens a step, {sizes.steps} steps, {len(results)} pairs "
            f"of processes. Logged losses and gradient norms agree to {worst:.1e}.",
            "",
            "| | patched | stock | patched / stock |\n|---|---|---|---|",
            cells("step, s", "seconds"),
            cells("CPU seconds per step", "cpu_seconds"),
            cells("peak memory, MiB", "mib"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--write", type=Path, help="folder for the table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(train(args.side, args)))
        return
    load = os.getloadavg()[0]
    options = [f"--{name}={getattr(args, name)}" for name in SIZES]
    text = report(measure(options, args.pairs, timeout=600), args)
    print(text)
    if args.write:
        head = "# A stock Trainer script in one process, with and without `patch(model)`"
        lines = [
            head,
            "",
            *describe_machine("benchmarks/trainer_one_process.py", load, 1),
            "",
            text,
            "",
        ]
        (args.write / "trainer-cpu.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
