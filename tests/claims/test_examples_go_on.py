"""An example that is started again goes on from its newest complete checkpoint."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import CPU_4, ROOT, run_script

from hf_moe_ep.checkpoints.storage import manifest

EXAMPLES = ROOT / "examples"
# Blocks of 64 values, of which NF4 makes one scale, divide it.
MODEL = ["--moe_intermediate_size", "192"]
COMMON = ["--ep_size", "2", "--block_size", "64", "--max_steps", "4", "--save_steps", "2"]
FLAGS = {
    "finetune_text.py": "--use_cpu --eval_blocks 8 --logging_steps 1 --report_to none "
    "--per_device_train_batch_size 2 --learning_rate 1e-2",
    "finetune_lora.py": "--use_cpu --eval_blocks 8 --logging_steps 1 --report_to none "
    "--per_device_train_batch_size 2 --learning_rate 1e-2",
    "finetune_qlora.py": "--use_cpu --eval_blocks 8 --logging_steps 1 --report_to none "
    "--per_device_train_batch_size 2 --learning_rate 1e-2",
    "finetune_text_loop.py": "--cpu --batch_size 2 --accumulation_steps 2 --lr 1e-2",
}


def _result(script: str, start: Path, folder: Path) -> tuple[list[float], str]:
    """Run it; the losses that it noted, and what it printed."""
    printed = folder.with_suffix(".txt")
    arguments = ["--model", str(start), "--output_dir", str(folder), *COMMON]
    arguments += FLAGS[script].split()
    run_script(EXAMPLES / script, *arguments, output=printed, config_file=CPU_4, timeout=400)
    text = printed.read_text()
    if script == "finetune_text_loop.py":
        return [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", text)], text
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    names = ("loss", "grad_norm", "eval_loss")
    return [entry[name] for entry in log for name in names if name in entry], text


@pytest.mark.slow
@pytest.mark.parametrize("script", FLAGS)
def test_it_goes_on(tmp_path: Path, script: str) -> None:
    """Step 2 is complete and step 3 is unfinished. The rest of the run is equal bit by bit."""
    start, whole, again = (tmp_path / name for name in ("start", "whole", "again"))
    making = [sys.executable, EXAMPLES / "make_small_model.py", start]
    subprocess.run([*making, *(MODEL if script == "finetune_qlora.py" else [])], check=True)
    want, said = _result(script, start, whole)
    assert len(want) == (1 if script == "finetune_text_loop.py" else 9), want
    assert "; skipped: " not in said
    name = "step" if script == "finetune_text_loop.py" else "checkpoint"
    shutil.copytree(whole / f"{name}-2", again / f"{name}-2")
    manifest.begin(again / f"{name}-3")
    shutil.rmtree(whole)
    got, said = _result(script, start, again)
    assert got == want
    assert f"resuming from {again / name}-2; skipped: " in said, said[-3000:]
    assert (again / f"{name}-4" / manifest.MANIFEST).exists()
