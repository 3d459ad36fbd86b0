"""A script like `run_clm_no_trainer.py` logs and saves the same on 4 ranks as in one process.

The ranks use ep 2 and ep 4. A run that is killed in an epoch resumes from its last state, and
continues bit by bit.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.close import assert_close
from support.hub_files import read_all
from support.scripts import CPU_4, run_script

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "clm_no_trainer.py"
STEPS = 6
FP32_BUDGET = 1e-5  # fp32 rounding (6e-8) after 6 AdamW steps; a wrong loss factor is off by 2x
# AdamW divides each gradient by its own magnitude. Rounding errors in gradients near zero therefore
# change a parameter by up to 1e-4.
AFTER_ADAMW = 1e-4


def run_job(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the script and return its log."""
    folder.mkdir(exist_ok=True)
    ranks = "--ep-size" in arguments
    batch = ["--batch", "2" if ranks else "8"]
    config_file = CPU_4 if ranks else None
    output = folder / "output.txt"
    run_script(JOB, os.fspath(folder), *batch, *arguments, output=output, config_file=config_file)
    return json.loads((folder / "run.json").read_text())


def assert_same_log(where: str, got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert [entry.keys() for entry in got] == [entry.keys() for entry in want]
    for ours, theirs in zip(got, want, strict=True):
        for key in theirs:
            pair = torch.tensor([ours[key], theirs[key]], dtype=torch.float64)
            assert_close(f"{where}, {key} of step {theirs['step']}", *pair, FP32_BUDGET)


@pytest.mark.slow
def test_a_loop_under_accelerate_equals_stock(tmp_path: Path) -> None:
    want = run_job(tmp_path / "stock")
    assert [entry["step"] for entry in want] == list(range(1, STEPS + 1))
    assert sum("eval_loss" in entry for entry in want) == 3
    stock = load_file(tmp_path / "stock" / "model" / "model.safetensors")
    for ep_size in ("2", "4"):
        folder = tmp_path / f"ep{ep_size}"
        got = run_job(folder, "--ep-size", ep_size)
        assert_same_log(f"ep {ep_size}", got, want)
        saved = read_all(folder / "model")
        assert saved.keys() == stock.keys()
        for name, tensor in stock.items():
            assert_close(f"ep {ep_size}, {name}", saved[name], tensor, AFTER_ADAMW)
        tracked = [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]
        assert [entry["step"] for entry in tracked] == [None, *range(1, STEPS + 1)]


@pytest.mark.slow
def test_a_killed_loop_resumes_from_its_last_state(tmp_path: Path) -> None:
    """The number of ranks is the same, so the resumed steps are equal bit by bit."""
    uninterrupted = run_job(tmp_path / "whole", "--ep-size", "2")
    with pytest.raises(AssertionError, match="exit code"):
        run_job(tmp_path / "killed", "--ep-size", "2", "--die-at", "3")
    state = os.fspath(tmp_path / "killed" / "step_3")
    resumed = run_job(tmp_path / "rest", "--ep-size", "2", "--resume", state)
    assert resumed == uninterrupted[3:]
    want, got = (read_all(tmp_path / name / "model") for name in ("whole", "rest"))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.slow
def test_a_tracker_that_fails_ends_all_ranks(tmp_path: Path) -> None:
    """The tracker runs on rank 0, whose error names it. The launcher ends the waiting ranks."""
    message = r"tracker 'lines' \(.*Lines\) failed on rank 0: OSError: no space left on device"
    with pytest.raises(AssertionError, match="exit code 1 of "):
        run_job(tmp_path / "failing", "--ep-size", "2", "--tracker-fails-at", "2")
    # The whole output is searched, because other ranks may print after rank 0's error.
    assert re.search(message, (tmp_path / "failing" / "output.txt").read_text())
