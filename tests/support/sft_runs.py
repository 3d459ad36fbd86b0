"""Run `support/jobs/sft.py`, in one process or on ranks, and read its logs."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from support.scripts import run_script

JOB = Path(__file__).resolve().parent / "jobs" / "sft.py"
STEPS = 4
FP32_BUDGET = 1e-5  # fp32 rounding (6e-8) after 4 AdamW steps; a wrong loss factor is off by 2x


def run_job(folder: Path, config_file: Path | None, *arguments: str) -> Any:
    """Run the script and return the results that it wrote."""
    folder.mkdir(exist_ok=True)
    output = folder / "output.txt"
    run_script(JOB, os.fspath(folder), *arguments, output=output, config_file=config_file)
    return json.loads((folder / "run.json").read_text())


def logged(run: Any, key: str, steps: int = STEPS) -> torch.Tensor:
    values = torch.tensor([entry[key] for entry in run["log"] if "loss" in entry])
    assert len(values) == steps
    return values
