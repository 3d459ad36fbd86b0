"""In examples/finetune_grpo.py on four ranks the reward rises, and stock loads the saved model.

The reward is the share of digits in the answer to a sum: about 1 % for an untrained model, and
almost 100 % after a few steps, also in a stock process that loads the saved model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.scripts import CPU_4, ROOT, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl", minversion="1.16")

EXAMPLES = ROOT / "examples"
STEPS = {"full": 5, "LoRA": 8}
FLAGS = "--ep_size 2 --use_cpu --bf16 False --seed 3 --learning_rate 3e-3 --logging_steps 1"
FLAGS += " --lr_scheduler_type constant --num_generations 8 --max_completion_length 6"
FLAGS += " --per_device_train_batch_size 8 --report_to none --disable_tqdm True --save_strategy no"


def measure_share_of_digits(model: Any, folder: Path) -> float:
    """Return the share of digits in a stock model's greedy answers to sums of another seed."""
    from finetune_grpo import in_digits, sums

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [row["prompt"] for row in sums(16, 50)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        tokens = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
    return sum(in_digits(answers)) / len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
def test_the_reward_rises(kind: str, tmp_path: Path) -> None:
    start, folder = tmp_path / "start", tmp_path / "out"
    subprocess.run([sys.executable, EXAMPLES / "make_small_model.py", start], check=True)
    flags = [*FLAGS.split(), "--max_steps", str(STEPS[kind]), *["--lora"] * (kind == "LoRA")]
    run_script(
        EXAMPLES / "finetune_grpo.py",
        *["--model", os.fspath(start), "--output_dir", os.fspath(folder), *flags],
        output=tmp_path / "out.txt",
        config_file=CPU_4,
        timeout=400,
        forked=False,
    )
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    rewards = [entry["rewards/in_digits/mean"] for entry in log if "loss" in entry]
    assert len(rewards) == STEPS[kind]
    assert rewards[0] < 0.1 and rewards[-1] > 0.7, rewards
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    assert measure_share_of_digits(before, start) < 0.1
    if kind == "LoRA":
        after = PeftModel.from_pretrained(before, folder)
    else:
        after = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert measure_share_of_digits(after, folder) > 0.7


def test_rewards_of_example_answers() -> None:
    from finetune_grpo import in_digits, right, sums

    assert right(["12", " 12, or 3", "13", "none", "112"], ["12"] * 5) == [1, 1, 0, 0, 0]
    assert in_digits(["12", "1 + ", "", "no"]) == [1, 0.25, 0, 0]
    rows = sums(50, 9)
    assert rows == sums(50, 9)
    for row in rows:
        first, second = row["prompt"].removesuffix(" = ").split(" + ")
        assert row["answer"] == str(int(first) + int(second))
