"""Stock PEFT loads the adapters of examples/finetune_lora.py and finetune_qlora.py.

The held-out loss in stock PEFT equals the loss that the Trainer logged. For QLoRA, stock's experts
get the values of the dequantised 4-bit experts.
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

from hf_moe_ep.cli.main import main as hf_moe_ep

EXAMPLES = ROOT / "examples"
BLOCK, BLOCKS = 64, 32
FLAGS = ["--ep_size", "2", "--lora_rank", "4", "--block_size", str(BLOCK)]
FLAGS += ["--eval_blocks", str(BLOCKS), "--use_cpu", "--max_steps", "12", "--logging_steps", "1"]
FLAGS += ["--learning_rate", "1e-2", "--report_to", "none", "--per_device_train_batch_size"]
# NF4 has one scale for each block of 64 values, and 192 is a multiple of 64.
NF4_SIZES = ["--moe_intermediate_size", "192"]


def _train(folder: Path, name: str, ranks: int, model: list[str], printed: str) -> float:
    """Run the example, and return the held-out loss that its Trainer logged."""
    making = [sys.executable, EXAMPLES / "make_small_model.py", folder / "start", *model]
    subprocess.run(making, check=True)
    launch, output, adapter = folder / "cpu.yaml", folder / "output.txt", folder / "adapter"
    launch.write_text(CPU_4.read_text().replace("num_processes: 4", f"num_processes: {ranks}"))
    run_script(
        EXAMPLES / f"{name}.py",
        *["--model", str(folder / "start"), "--output_dir", str(adapter), *FLAGS, str(16 // ranks)],
        output=output,
        config_file=launch,
        timeout=400,
        forked=False,
    )
    assert printed in output.read_text()
    log = json.loads((adapter / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    return next(entry["eval_loss"] for entry in log if "eval_loss" in entry)


def _compute_held_out_loss(base: Path, adapter: Path, kind: str | None = None) -> float:
    """Return the loss of stock PEFT. `kind` quantises and dequantises the experts of the base."""
    from text_data import pack, split_text

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if kind is not None:
        dequantise_experts(model, kind)
    model = PeftModel.from_pretrained(model, adapter).eval()
    blocks = pack(AutoTokenizer.from_pretrained(base), split_text()[1], BLOCK, BLOCKS)
    with torch.no_grad():
        losses = [
            model(**{name: x.unsqueeze(0) for name, x in block.items()}).loss for block in blocks
        ]
    return torch.stack(losses).mean().item()


@pytest.mark.slow
def test_lora_has_the_trainers_loss_in_stock_peft(tmp_path: Path) -> None:
    want = _train(tmp_path, "finetune_lora", 4, [], "trainable params")
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    assert abs(_compute_held_out_loss(start, adapter) - want) < 1e-4
    # The adapter is converted to the layout of servers, and back again.
    served, fused = str(tmp_path / "served"), tmp_path / "back"
    assert hf_moe_ep(["export-adapter", str(adapter), served]) == 0
    assert hf_moe_ep(["export-adapter", served, str(fused), "--to", "fused"]) == 0
    assert _compute_held_out_loss(start, fused) == pytest.approx(
        _compute_held_out_loss(start, adapter), abs=0
    )


@pytest.mark.slow
def test_qlora_has_the_trainers_loss_in_stock_peft(tmp_path: Path) -> None:
    want = _train(tmp_path, "finetune_qlora", 2, NF4_SIZES, "held in nf4")
    start, adapter = tmp_path / "start", tmp_path / "adapter"
    assert abs(_compute_held_out_loss(start, adapter, "nf4") - want) < 1e-4
    # With the experts of the checkpoint, which are not quantised, the loss differs by more.
    assert abs(_compute_held_out_loss(start, adapter) - want) > 1e-4
