"""GRPO and RLOO that generate with the trained model log the same on 4 ranks as in one process.

Prompts and completions have different lengths, prompts are padded on the left, and generation uses
a cache. Each generation serves two steps with gradient checkpointing. With LoRA, the reference is
the policy without its adapters.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.scripts import CPU_4, run_script
from support.trl_cases import GENERATING, GENERATING_EP

pytest.importorskip("trl", minversion="1.15")

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "online.py"
RANKS, GLOBAL_BATCH, STEPS = 4, 8, 3
FP32_BUDGET = 1e-5  # fp32 rounding (6e-8) after 3 AdamW steps; a wrong loss factor is off by 2x
# The advantages of a group add up to 0, so the terms of a loss, of about 1, may almost cancel.
# Values below CANCELLED are therefore compared absolutely.
CANCELLED = 0.1
SAME = ("reward", "reward_std", "num_tokens", "completions/mean_length")
CLOSE = ("loss", "grad_norm", "aux_loss", "entropy", "kl")


@dataclass
class Run:
    log: list[dict[str, float]]
    generated: list[str]


def run_job(folder: Path, *arguments: str, ranks: int) -> Run:
    """Run the script, and return its results with completions in the global batch's order."""
    folder.mkdir()
    batch = GLOBAL_BATCH // ranks
    arguments = (os.fspath(folder), "--batch", str(batch), *arguments)
    config_file = CPU_4 if ranks > 1 else None
    run_script(JOB, *arguments, output=folder / "output.txt", config_file=config_file)
    log = json.loads((folder / "run.json").read_text())["log"]
    rows_by_rank = [
        json.loads((folder / f"generated{rank}.json").read_text()) for rank in range(ranks)
    ]
    starts = range(0, len(rows_by_rank[0]), batch)
    generated = [
        row for start in starts for rows in rows_by_rank for row in rows[start : start + batch]
    ]
    return Run([entry for entry in log if "loss" in entry], generated)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", GENERATING)
def test_generation_under_training_equals_stock(trainer: str, tmp_path: Path) -> None:
    """Generated tokens and rewards are equal. Losses and gradient norms are close."""
    name, *variants = trainer.split(", ")
    options = ["--trainer", name, *(f"--{variant.lower()}" for variant in variants)]
    want = run_job(tmp_path / "stock", *options, ranks=1)
    assert len(want.log) == STEPS and len(want.generated) == 2 * GLOBAL_BATCH
    lengths = {len(row.split()) for row in want.generated}
    assert len(lengths) > 1 or "greedy" in variants
    for ep_size in GENERATING_EP:
        got = run_job(tmp_path / f"ep{ep_size}", *options, "--ep-size", str(ep_size), ranks=RANKS)
        assert got.generated == want.generated, f"ep {ep_size}"
        assert_same_log(f"ep {ep_size}", got, want, kl="LoRA" in variants)


def assert_same_log(where: str, got: Run, want: Run, *, kl: bool) -> None:
    for step, (ours, theirs) in enumerate(zip(got.log, want.log, strict=True), start=1):
        assert ours.keys() == theirs.keys() and ("kl" in want.log[0]) == kl
        for key in (key for key in SAME if key in theirs):
            assert ours[key] == theirs[key], f"{where}, {key} of step {step}"
        for key in (key for key in CLOSE if key in theirs):
            budget = FP32_BUDGET * max(abs(theirs[key]), CANCELLED)
            assert abs(ours[key] - theirs[key]) <= budget, (where, step, key, ours, theirs)
