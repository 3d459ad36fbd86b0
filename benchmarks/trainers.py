"""Time the command of a trainer with and without `hf-moe-ep run --ep-size 1`.

    python benchmarks/trainers.py                                           TRL
    export PYTHONPATH=tests/support/trainers_on_cpu
    .venv-trainers/axolotl/bin/python benchmarks/trainers.py --trainer axolotl
    .venv-trainers/ms_swift/bin/python benchmarks/trainers.py --trainer ms_swift
    .venv-trainers/llama_factory/bin/python benchmarks/trainers.py --trainer llama_factory

`make test-trainers` makes the environments of the other trainers, which need the folder in
PYTHONPATH where there is no GPU. Both sides train the same
Qwen3-MoE in one process. They run in new processes in turn (stock, ours, ours, stock, ...), and
their losses and gradient norms must agree; otherwise the benchmark raises an error.

    step             time from the log of one step to the log of the next step; median of a process,
                     without the first two steps
    whole command    time from the start of the process to its end
    CPU seconds      CPU time of the process and of its child processes, which a busy machine
                     disturbs least
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_text import describe_machine, format_row

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1] / "tests"))

from support.commands import LOSS_BUDGET, MODEL, NORM_BUDGET, ON_CPU, make_inputs
from support.scripts import ROOT
from support.trainer_configs import make_config, write_alpaca_data, write_config

SIDES = ("stock", "ours")
RUNNER = (sys.executable, "-m", "hf_moe_ep", "run", "--ep-size", "1", "--")
PATCHED = "hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 1)"
WARMUP_STEPS = 2
BATCH, STEPS = 16, 12
SIZES = {
    "hidden_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
TRL = (
    f"--model_name_or_path {MODEL} --dataset_name chat --save_strategy steps --logging_steps 1 "
    "--learning_rate 1e-4 --lr_scheduler_type constant --use_cpu --bf16 False --dtype float32 "
    "--report_to none --disable_tqdm True"
)


@dataclass(frozen=True)
class Trainer:
    """A trainer whose command reads a YAML file.

    Attributes:
        command: the command; {} stands for the file.
        batch: the key of the batch size.
        left_out: keys of the example that a run in one process does not have.
    """

    command: str
    batch: str
    left_out: tuple[str, ...]


TRAINERS = {
    "axolotl": Trainer(
        "axolotl train {} --launcher python",
        "micro_batch_size",
        ("plugins", "hf_moe_ep", "fsdp_version", "fsdp_config"),
    ),
    "ms_swift": Trainer("swift sft {}", "per_device_train_batch_size", ("fsdp",)),
    "llama_factory": Trainer(
        "llamafactory-cli train {}", "per_device_train_batch_size", ("fsdp", "fsdp_config")
    ),
}


@dataclass(frozen=True)
class Result:
    """What one process printed and logged, and the times of its steps."""

    steps: list[float]
    whole: float
    cpu_seconds: float
    entries: list[dict[str, float]]

    @property
    def step(self) -> float:
        """The median of the steps after the first ones."""
        return statistics.median(self.steps[WARMUP_STEPS - 1 :])


def make_command(trainer: str, output: str, folder: Path, batch: int, steps: int) -> list[str]:
    """Return the command of a trainer in one process, after writing its file."""
    if trainer == "trl":
        sizes = f"--per_device_train_batch_size {batch} --max_steps {steps} --save_steps {steps}"
        return f"trl sft {TRL} {sizes} --output_dir {output}".split()
    this = TRAINERS[trainer]
    changes: dict[str, Any] = {this.batch: batch, "max_steps": steps, "save_steps": steps}
    if trainer == "axolotl":
        changes["dataset_prepared_path"] = f"prepared_{output}"
    config = make_config(trainer, output, **changes, **dict.fromkeys(this.left_out))
    return this.command.format(write_config(config, folder)).split()


def run(side: str, command: list[str], output: Path, steps: int, timeout: float) -> Result:
    """Run a command of `steps` steps with or without `hf-moe-ep run`.

    Raises:
        RuntimeError: the command failed or took too long, or the wrong side was patched.
    """
    paths = (os.fspath(ROOT), ON_CPU)
    environment = os.environ | {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": os.fspath(output.parent / "cache"),
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",  # of LLaMA-Factory
    }
    start = time.perf_counter()
    process = subprocess.Popen(
        [*(RUNNER if side == "ours" else ()), *command],
        env=environment,
        cwd=output.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    lines, ends = [], []
    for line in process.stdout:
        lines.append(line.decode(errors="replace"))
        if b"'loss': '" in line:  # every trainer prints the log of each step in this form
            ends.append(time.perf_counter())
    _, status, usage = os.wait4(process.pid, 0)
    whole = time.perf_counter() - start
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    printed = "".join(lines)
    if process.returncode or (PATCHED in printed) != (side == "ours"):
        raise RuntimeError(f"{side}: exit code {process.returncode} of {command}:\n{printed}")
    (state,) = output.glob(f"**/checkpoint-{steps}/trainer_state.json")
    entries = [e for e in json.loads(state.read_text())["log_history"] if "loss" in e]
    return Result(
        steps=[after - before for before, after in itertools.pairwise(ends)],
        whole=whole,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        entries=entries,
    )


def check_equal(pair: dict[str, Result]) -> float:
    """Return the largest relative difference of losses. Raise if the two sides differ."""
    worst = 0.0
    for stock, ours in zip(*(pair[side].entries for side in SIDES), strict=True):
        for key, budget in (("loss", LOSS_BUDGET), ("grad_norm", NORM_BUDGET)):
            error = abs(ours[key] - stock[key]) / abs(stock[key])
            if not error <= budget:
                raise RuntimeError(
                    f"step {stock['step']}: {key} is {ours[key]} with hf-moe-ep run and "
                    f"{stock[key]} without, a relative difference of {error:.1e} (allowed "
                    f"{budget:.0e})"
                )
            worst = max(worst, error if key == "loss" else 0.0)
    return worst


def measure(
    trainer: str, sizes: dict[str, int], batch: int, steps: int, pairs: int, timeout: float
) -> list[dict[str, Result]]:
    """Run `pairs` pairs of processes. Returns the results of each pair by side."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_inputs(Path(name), **sizes)
        write_alpaca_data(folder)
        for index in range(pairs):
            pair = {}
            for side in SIDES if index % 2 == 0 else SIDES[::-1]:
                output = f"{side}_{index}"
                command = make_command(trainer, output, folder, batch, steps)
                pair[side] = run(side, command, folder / output, steps, timeout)
                print(f"pair {index + 1} of {pairs}, {side}: {pair[side].step:.3f} s", flush=True)
            check_equal(pair)
            results.append(pair)
    return results


def report(
    trainer: str, sizes: dict[str, int], batch: int, steps: int, results: list[dict[str, Result]]
) -> str:
    """Return the table of a trainer."""
    worst = max(check_equal(pair) for pair in results)

    def cells(name: str, key: str) -> str:
        columns = ([getattr(pair[side], key) for pair in results] for side in reversed(SIDES))
        return f"| {format_row(name, *columns)} |"

    described = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return "\n".join(
        [
            f"{trainer}: Qwen3-MoE, fp32, one process: {described}; {batch} samples a step, "
            f"{steps} steps, {len(results)} pairs of processes. Logged losses agree to "
            f"{worst:.1e}.",
            "",
            "| | with `hf-moe-ep run` | stock | with / stock |\n|---|---|---|---|",
            cells("step, s", "step"),
            cells("whole command, s", "whole"),
            cells("CPU seconds of the command", "cpu_seconds"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", choices=("trl", *TRAINERS), default="trl")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--write", type=Path, help="folder for the table")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    sizes = {name: getattr(args, name) for name in SIZES}
    results = measure(args.trainer, sizes, args.batch, args.steps, args.pairs, timeout=600)
    text = report(args.trainer, sizes, args.batch, args.steps, results)
    print(text)
    if args.write:
        head = f"# A command of {args.trainer} with and without `hf-moe-ep run --ep-size 1`"
        about = describe_machine("benchmarks/trainers.py", load, 1)
        name = f"trainers-{args.trainer.replace('_', '-')}-cpu.md"
        (args.write / name).write_text("\n".join([head, "", *about, "", text, ""]))


if __name__ == "__main__":
    main()
