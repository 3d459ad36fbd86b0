"""The adapter of examples/finetune_qlora.py on two ranks opens in stock PEFT, on what was trained.

Stock's experts get the values that 4 bits stand for; then its held-out loss is the Trainer's.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.quantised import dequantise_experts
from support.scripts import CPU_4, ROOT, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = ROOT / "examples"
BLOCK, BLOCKS = 64, 32
FLAGS = ["--ep_size", "2", "--lora_rank", "4", "--block_size", str(BLOCK)]
FLAGS += ["--eval_blocks", str(BLOCKS), "--use_cpu", "--max_steps", "12", "--logging_steps", "1"]
FLAGS += ["--learning_rate", "1e-2", "--per_device_train_batch_size", "8", "--report_to", "none"]


@pytest.mark.slow
def test_its_adapter_has_the_trainers_loss_in_stock_peft(tmp_path: Path) -> None:
    start, adapter, two = tmp_path / "start", tmp_path / "adapter", tmp_path / "cpu_2.yaml"
    making = [sys.executable, EXAMPLES / "make_small_model.py", start]
    # Blocks of 64 divide it, and not what `make demo` takes.
    subprocess.run([*making, "--moe_intermediate_size", "192"], check=True)
    two.write_text(CPU_4.read_text().replace("num_processes: 4", "num_processes: 2"))
    run_script(
        EXAMPLES / "finetune_qlora.py",
        *["--model", str(start), "--output_dir", str(adapter), *FLAGS],
        output=tmp_path / "output.txt",
        config_file=two,
        timeout=400,
    )
    assert "held in nf4" in (tmp_path / "output.txt").read_text()
    log = json.loads((adapter / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    want = next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert abs(_held_out_loss(start, adapter, "nf4") - want) < 1e-4
    # Experts as they lie in the checkpoint are others.
    assert abs(_held_out_loss(start, adapter, None) - want) > 1e-3


def _held_out_loss(base: Path, adapter: Path, kind: str | None) -> float:
    from text_data import pack, split_text

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if kind is not None:
        dequantise_experts(model, kind)
    opened = PeftModel.from_pretrained(model, adapter).eval()
    blocks = pack(AutoTokenizer.from_pretrained(base), split_text()[1], BLOCK, BLOCKS)
    with torch.no_grad():
        losses = [
            opened(**{name: x.unsqueeze(0) for name, x in block.items()}).loss for block in blocks
        ]
    return torch.stack(losses).mean().item()
