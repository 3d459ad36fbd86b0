"""examples/finetune_dpo.py on four ranks logs what it logs stock in one process, and saves it.

The reference is TRL's own: the checkpoint that the policy was loaded from.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import CPU_4, ROOT, run_script
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", minversion="1.16")

EXAMPLES = ROOT / "examples"
FLAGS = "--use_cpu --bf16 False --max_steps 6 --logging_steps 1 --report_to none --seed 3"
FLAGS += " --learning_rate 1e-3 --disable_tqdm True --save_strategy no"
# A step of AdamW divides a gradient by its own size: where that is near zero, roundings count.
BUDGET = 1e-4
NUM_PAIRS = 64


def _run(start: Path, folder: Path, config_file: Path | None, *flags: str) -> list[dict[str, Any]]:
    run_script(
        EXAMPLES / "finetune_dpo.py",
        *["--model", os.fspath(start), "--output_dir", os.fspath(folder), *FLAGS.split(), *flags],
        output=folder.with_suffix(".txt"),
        config_file=config_file,
        timeout=400,
    )
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in log if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::FutureWarning")
def test_its_losses_and_margins_are_stocks(tmp_path: Path) -> None:
    from finetune_dpo import continuations
    from text_data import split_text

    start = tmp_path / "start"
    subprocess.run([sys.executable, EXAMPLES / "make_small_model.py", start], check=True)
    file = tmp_path / "pairs.jsonl"
    pairs = continuations(split_text()[0])[:NUM_PAIRS]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = ["--preferences", os.fspath(file), "--per_device_train_batch_size"]
    want = _run(start, tmp_path / "stock", None, *flags, "8", "--ep_size", "0")
    got = _run(start, tmp_path / "ranks", CPU_4, *flags, "2", "--ep_size", "2")
    assert len(want) == len(got) == 6
    for ours, theirs in zip(got, want, strict=True):
        for key in ("loss", "rewards/margins", "logps/chosen"):
            assert abs(ours[key] - theirs[key]) <= BUDGET * max(1.0, abs(theirs[key])), (key, ours)
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= BUDGET * theirs["grad_norm"]
    # At first the policy is its reference: log 2, and a little for the router's balance.
    assert 0 <= want[0]["loss"] - math.log(2) < 0.01
    assert abs(got[-1]["rewards/margins"]) > 0.01  # it has left its reference
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    moved = [
        (ours - theirs).abs().max()
        for ours, theirs in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert 1e-4 < max(moved) < 6e-2
