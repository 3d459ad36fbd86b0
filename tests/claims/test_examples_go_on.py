"""An example that is started again resumes from its newest complete checkpoint.

The loop without the Trainer has the same loss if ranks share batches.
"""

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
# NF4 has one scale for each block of 64 values, and 192 is a multiple of 64.
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


def _run_example(script: str, start: Path, folder: Path) -> tuple[list[float], str]:
    """Run the example, and return the losses that it logged and its output."""
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
def test_an_example_resumes(tmp_path: Path, script: str) -> None:
    """The checkpoint of step 2 is complete, and the checkpoint of step 3 is not. The resumed run
    continues with step 3 and equals the whole run bit by bit.
    """
    start, uninterrupted, resumed = (tmp_path / name for name in ("start", "whole", "again"))
    making = [sys.executable, EXAMPLES / "make_small_model.py", start]
    subprocess.run([*making, *(MODEL if script == "finetune_qlora.py" else [])], check=True)
    want, output = _run_example(script, start, uninterrupted)
    assert len(want) == (1 if script == "finetune_text_loop.py" else 9), want
    assert "; skipped: " not in output
    name = "step" if script == "finetune_text_loop.py" else "checkpoint"
    shutil.copytree(uninterrupted / f"{name}-2", resumed / f"{name}-2")
    manifest.begin(resumed / f"{name}-3")
    shutil.rmtree(uninterrupted)
    got, output = _run_example(script, start, resumed)
    assert got == want
    assert f"resuming from {resumed / name}-2; skipped: " in output, output[-3000:]
    assert (resumed / f"{name}-4" / manifest.MANIFEST).exists()


@pytest.mark.slow
def test_the_loop_has_the_same_loss_if_ranks_share_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has the same 8 blocks: 4 data ranks with 2 each, or 2 data ranks with 4."""
    start = tmp_path / "start"
    subprocess.run([sys.executable, EXAMPLES / "make_small_model.py", start], check=True)
    losses = []
    for sp_size, batch_size in (("1", "2"), ("2", "4")):
        monkeypatch.setenv("HF_MOE_EP_SP_SIZE", sp_size)
        printed = tmp_path / f"sp_{sp_size}.txt"
        arguments = ["--model", str(start), "--output_dir", str(tmp_path / sp_size), "--cpu"]
        arguments += ["--ep_size", "2", "--block_size", "64", "--max_steps", "1"]
        arguments += ["--batch_size", batch_size]
        script = EXAMPLES / "finetune_text_loop.py"
        run_script(script, *arguments, output=printed, config_file=CPU_4, timeout=400)
        losses.append(float(re.findall(r"\bloss=([\d.]+)", printed.read_text())[-1]))
    # The example prints four decimals.
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
