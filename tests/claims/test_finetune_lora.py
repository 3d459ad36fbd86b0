"""The adapter of examples/finetune_lora.py on four ranks opens in a stock process, in both ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.scripts import CPU_4, ROOT, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moe_ep.cli.main import main as hf_moe_ep

EXAMPLES = ROOT / "examples"
BLOCK, BLOCKS = 64, 32
FLAGS = ["--ep_size", "2", "--lora_rank", "4", "--block_size", str(BLOCK)]
FLAGS += ["--eval_blocks", str(BLOCKS), "--use_cpu", "--max_steps", "12", "--logging_steps", "1"]
FLAGS += ["--learning_rate", "1e-2", "--per_device_train_batch_size", "4", "--report_to", "none"]


@pytest.mark.slow
def test_its_adapter_has_the_trainers_loss_in_stock_peft(tmp_path: Path) -> None:
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    subprocess.run([sys.executable, EXAMPLES / "make_small_model.py", start], check=True)
    run_script(
        EXAMPLES / "finetune_lora.py",
        *["--model", str(start), "--output_dir", str(adapter), *FLAGS],
        output=tmp_path / "output.txt",
        config_file=CPU_4,
        timeout=400,
    )
    assert "trainable params" in (tmp_path / "output.txt").read_text()
    log = json.loads((adapter / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    want = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert abs(_held_out_loss(start, adapter) - want) < 1e-4

    # What a server would get, and back.
    assert hf_moe_ep(["export-adapter", str(adapter), str(tmp_path / "served")]) == 0
    back = tmp_path / "back"
    assert hf_moe_ep(["export-adapter", str(tmp_path / "served"), str(back), "--to", "fused"]) == 0
    assert _held_out_loss(start, back) == pytest.approx(_held_out_loss(start, adapter), abs=0)


def _held_out_loss(base: Path, adapter: Path) -> float:
    from text_data import pack, split_text

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).eval()
    blocks = pack(AutoTokenizer.from_pretrained(base), split_text()[1], BLOCK, BLOCKS)
    with torch.no_grad():
        losses = [
            model(**{name: x.unsqueeze(0) for name, x in block.items()}).loss for block in blocks
        ]
    return torch.stack(losses).mean().item()
