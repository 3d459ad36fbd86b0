"""LLaMA-Factory with `hf-moe-ep run` trains on two ranks as stock does in one process.

The configuration is examples/trainers/llama_factory.yaml with a tiny model. Losses, gradient norms
(with clipping) and saved tensors of six steps are compared.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import commands
from support.commands import (
    MAX_GRAD_NORM,
    MODEL,
    ON_CPU,
    RANKS,
    STEPS,
    STOCK_BATCH,
    assert_same_training,
    read_training_log,
    run_ours,
    run_stock,
)
from support.scripts import ROOT

pytest.importorskip("llamafactory", reason="needs LLaMA-Factory (make test-trainers)")

EXAMPLE = ROOT / "examples" / "trainers" / "llama_factory.yaml"
VARIABLES = {"PYTHONPATH": ON_CPU, "DISABLE_VERSION_CHECK": "1"}
LAUNCH = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS)}
FSDP = ("fsdp", "fsdp_config")
Config = dict[str, Any]
# Settings for a tiny model, for comparable runs, and for features that the CPU lacks.
TINY: Config = {
    "model_name_or_path": MODEL,
    "template": "chatml",
    "dataset": "alpaca",
    "cutoff_len": 128,
    "disable_shuffling": True,
    "dataloader_num_workers": 0,
    "packing": False,
    "use_cpu": True,
    "bf16": False,
    "optim": "adamw_torch",
    # Some elements of adapters have gradients that are as small as the rounding errors of others.
    # With the default epsilon of 1e-8, AdamW would make steps of the learning rate from them.
    "adam_epsilon": 1e-4,
    "disable_gradient_checkpointing": True,
    "per_device_train_batch_size": STOCK_BATCH,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": MAX_GRAD_NORM,
    "max_steps": STEPS,
    "save_steps": STEPS,
    "report_to": "none",
    "seed": 3,
}
# PEFT turns the names of experts' matrices into target_parameters.
LORA: Config = {
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target": "q_proj,v_proj,gate_proj,up_proj,down_proj",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = commands.make_inputs(tmp_path_factory.mktemp("llamafactory"))
    lines = []
    for line in (folder / "chat/train.jsonl").open():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        lines.append(json.dumps({"instruction": question, "input": "", "output": answer}) + "\n")
    # The example's `dataset_dir: ONLINE` loads a folder like a data set of the hub.
    (folder / "alpaca").mkdir()
    (folder / "alpaca/train.jsonl").write_text("".join(lines))
    return folder


def make_command(folder: Path, output: str, **changes: Any) -> list[str]:
    """Write the example's configuration for the tiny model, and return the command.

    A change to None removes a key.
    """
    config = yaml.safe_load(EXAMPLE.read_text()) | TINY | {"output_dir": output} | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(kept))
    return ["llamafactory-cli", "train", f"{output}.yaml"]


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "LoRA on experts"])
def test_two_ranks_train_as_stock(changes: Config, folder: Path) -> None:
    name = changes.get("finetuning_type", "full")
    stock_output, output = f"stock_{name}", name
    run_stock(
        make_command(folder, stock_output, **dict.fromkeys(FSDP), **changes), folder, **VARIABLES
    )
    batch = {"per_device_train_batch_size": STOCK_BATCH // RANKS}
    printed = run_ours(
        make_command(folder, output, **batch, **changes), folder, **VARIABLES, **LAUNCH
    )
    assert printed.count("hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2)") == 1
    assert "layout     2 ranks = dp_replicate 1 x ep_fsdp 1 x ep 2" in printed
    assert_same_training(folder / output, folder / stock_output)
    assert all(entry["tokens_per_second"] > 0 for entry in read_training_log(folder / output))
