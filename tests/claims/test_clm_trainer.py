"""A script like transformers' `run_clm.py` logs the same values on 4 ranks as stock in one process.

The script uses the Trainer, and the ranks use ep 2. Losses, gradient norms, accuracy and perplexity
are compared, and stock loads the saved model.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.close import assert_close
from support.jobs.trainer import load_stock
from support.scripts import CPU_4, run_script
from support.tiny_models import batch

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "clm_trainer.py"
STEPS = 6
BUDGETS = {"loss": 1e-6, "eval_loss": 1e-6, "grad_norm": 1e-5, "eval_accuracy": 0.0}
# AdamW divides each gradient by its own magnitude. Rounding errors in gradients near zero therefore
# change a parameter by up to 1e-4.
AFTER_ADAMW = 1e-4


def run_job(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the script and return the Trainer's log."""
    folder.mkdir(exist_ok=True)
    ranks = "--ep_size" in arguments
    batch_size = "2" if ranks else "8"
    options = {
        "output_dir": os.fspath(folder),
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": "2",
        "gradient_checkpointing": "true",
        "learning_rate": "3e-3",
        "max_grad_norm": "0.5",
        "max_steps": str(STEPS),
        "warmup_steps": "2",
        "logging_steps": "1",
        "eval_strategy": "steps",
        "eval_steps": "3",
        "save_steps": "3",
        "report_to": "none",
        "disable_tqdm": "true",
    }
    option_words = [word for name, value in options.items() for word in (f"--{name}", value)]
    flags = ["--use_cpu", "--do_train", "--do_eval"]
    run_script(
        JOB,
        *option_words,
        *flags,
        *arguments,
        output=folder / "output.txt",
        config_file=CPU_4 if ranks else None,
    )
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: entry[key] for key in ("step", *BUDGETS) if key in entry} for entry in log]


def assert_same_log(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert [entry.keys() for entry in got] == [entry.keys() for entry in want]
    for ours, theirs in zip(got, want, strict=True):
        for key in theirs.keys() & BUDGETS:
            pair = torch.tensor([ours[key], theirs[key]], dtype=torch.float64)
            assert_close(f"{key} of step {theirs['step']}", *pair, BUDGETS[key])


def assert_same_results(folder: Path, stock: Path, num_eval: int) -> None:
    got, want = (json.loads((path / "all_results.json").read_text()) for path in (folder, stock))
    assert got.keys() == want.keys()
    num_tokens = num_eval * 15  # each block counts once
    assert got["eval_predicted"] == want["eval_predicted"] == num_tokens
    for key, budget in {"perplexity": 1e-6, "eval_accuracy": 0.0, "train_loss": 1e-6}.items():
        pair = torch.tensor([got[key], want[key]], dtype=torch.float64)
        assert_close(key, *pair, budget)


# With 12 blocks, half of the last batch consists of repeated blocks. The aux loss is computed for a
# whole batch and would include the repeated blocks, so it is tested with 16 blocks.
@pytest.mark.slow
@pytest.mark.parametrize(("aux_loss", "num_eval"), [(False, 12), (True, 16)])
def test_the_script_equals_stock(tmp_path: Path, aux_loss: bool, num_eval: int) -> None:
    options = ("--aux_loss", str(aux_loss), "--max_eval_samples", str(num_eval))
    want = run_job(tmp_path / "stock", *options)
    assert sum("loss" in entry for entry in want) == STEPS
    assert sum("eval_loss" in entry for entry in want) == 2
    got = run_job(tmp_path / "ranks", "--ep_size", "2", *options)
    assert_same_log(got, want)
    assert_same_results(tmp_path / "ranks", tmp_path / "stock", num_eval)
    stock, saved = (load_stock(tmp_path / name) for name in ("stock", "ranks"))
    for name, parameter in stock.state_dict().items():
        assert_close(name, saved.state_dict()[name], parameter, AFTER_ADAMW)
    inputs = batch(stock, 3, 9, pad=2)
    with torch.no_grad():
        assert_close("logits", saved(**inputs).logits, stock(**inputs).logits, AFTER_ADAMW)
