"""LLaMA-Factory with `hf-moe-ep run` trains on two ranks as stock does in one process.

The configuration is examples/trainers/llama_factory.yaml with a tiny model. Losses, gradient norms
(with clipping) and saved tensors of six steps are compared.
"""

from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.commands import (
    ON_CPU,
    RANKS,
    STOCK_BATCH,
    assert_adapts_experts,
    assert_same_training,
    read_training_log,
    run_ours,
    run_stock,
)
from support.trainer_configs import Config, make_config, write_alpaca_data, write_config

pytest.importorskip("llamafactory", reason="needs LLaMA-Factory (make test-trainers)")

VARIABLES = {"PYTHONPATH": ON_CPU, "DISABLE_VERSION_CHECK": "1"}
LAUNCH = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS)}
FSDP = ("fsdp", "fsdp_config")
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
    write_alpaca_data(folder)
    return folder


def make_command(folder: Path, output: str, **changes: Any) -> list[str]:
    """Write the example's configuration for the tiny model, and return the command.

    A change to None removes a key.
    """
    config = make_config("llama_factory", output, **changes)
    return ["llamafactory-cli", "train", write_config(config, folder)]


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "LoRA on experts"])
def test_two_ranks_train_as_stock(changes: Config, folder: Path) -> None:
    """Activation checkpointing is LLaMA-Factory's default, with a function of its own."""
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
    assert "sharding will read its layers from" in printed
    assert_same_training(folder / output, folder / stock_output)
    log = read_training_log(folder / output)
    assert all(entry["tokens_per_second"] > 0 for entry in log)
    assert all(entry["expert_load/worst_layer"] >= 1 for entry in log)
    assert "Gradient checkpointing enabled." in printed
    if changes is LORA:
        assert_adapts_experts(folder / output)
