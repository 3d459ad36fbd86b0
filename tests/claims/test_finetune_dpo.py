"""examples/finetune_dpo.py logs the same numbers on four ranks as stock does in one process.

TRL loads the reference model by default: the checkpoint from which training starts.
At the end, the script saves a model that transformers can load.
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
# AdamW divides each gradient by its own magnitude. Rounding errors in gradients near zero therefore
# change a step by much more than fp32 rounding.
BUDGET = 1e-4
NUM_PAIRS = 64


def _run(start: Path, folder: Path, config_file: Path | None, *flags: str) -> list[dict[str, Any]]:
    run_script(
        EXAMPLES / "finetune_dpo.py",
        *["--model", os.fspath(start), "--output_dir", os.fspath(folder), *FLAGS.split(), *flags],
        output=folder.with_suffix(".txt"),
        config_file=config_file,
        timeout=400,
        forked=False,
    )
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in log if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::FutureWarning")
def test_losses_and_margins_equal_stock(tmp_path: Path) -> None:
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
    # Before the first step the policy equals the reference, so the DPO loss is log 2. The
    # small rest is the load-balancing loss of the router.
    assert 0 <= want[0]["loss"] - math.log(2) < 0.01
    assert abs(got[-1]["rewards/margins"]) > 0.01  # policy and reference differ now
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks", dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    changes = [
        (after - before).abs().max()
        for after, before in zip(saved.parameters(), initial.parameters(), strict=True)
    ]
    assert 1e-4 < max(changes) < 6e-2
