"""A stock Trainer script on two ranks trains as in one process, with every launcher."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from support.commands import (
    LAUNCH_CONFIG,
    MAX_GRAD_NORM,
    RANKS,
    STEPS,
    STOCK_BATCH,
    assert_same_training,
    run_ours,
    run_stock,
    write_launch_config,
)
from support.scripts import ROOT
from support.tiny_models import tiny

SCRIPT = str(ROOT / "tests" / "support" / "jobs" / "unpatched.py")
FSDP = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
ACCELERATE = f"accelerate launch --config_file {LAUNCH_CONFIG}"
TRAINERS_FSDP = "--fsdp full_shard --fsdp_config fsdp.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model and the launch configs. Train stock from the saved model and from its config."""
    folder = tmp_path_factory.mktemp("launches")
    tiny(dtype=torch.float32).save_pretrained(folder / "model")
    write_launch_config(folder)
    (folder / "fsdp.json").write_text(json.dumps(FSDP))
    run_stock([sys.executable, SCRIPT, *make_options("stock", STOCK_BATCH)], folder)
    from_config = [*make_options("stock_config", STOCK_BATCH), "--from_config"]
    run_stock([sys.executable, SCRIPT, *from_config], folder)
    return folder


def make_options(output: str, batch: int) -> list[str]:
    return (
        f"--model model --output_dir {output} --per_device_train_batch_size {batch} "
        f"--max_steps {STEPS} --save_steps {STEPS} --logging_steps 1 --learning_rate 1e-4 "
        f"--max_grad_norm {MAX_GRAD_NORM} --use_cpu --report_to none --disable_tqdm True"
    ).split()


# The commands that start the script. {port} is a free port.
LAUNCHES = {
    "accelerate": f"{ACCELERATE} {SCRIPT}",
    "accelerate, from_config": f"{ACCELERATE} {SCRIPT}",
    "accelerate, module": f"{ACCELERATE} -m support.jobs.unpatched",
    "torchrun": f"torchrun --nproc_per_node {RANKS} --master_port {{port}} {SCRIPT}",
    "own ranks": f"{sys.executable} {SCRIPT} --spawn {RANKS}",
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_unchanged_script_trains_as_stock(launch: str, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    output = launch.replace(", ", "_").replace(" ", "_")
    words = LAUNCHES[launch].format(port=port).split()
    command = [*words, *make_options(output, STOCK_BATCH // RANKS)]
    if not words[0].startswith("accelerate"):
        command += TRAINERS_FSDP.split()
    if "from_config" in launch:
        command.append("--from_config")
    variables = {"PYTHONPATH": str(ROOT / "tests"), "MASTER_PORT": port}
    printed = run_ours(command, folder, **variables)
    assert printed.count("hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2)") == 1
    stock = "stock_config" if "from_config" in launch else "stock"
    assert_same_training(folder / output, folder / stock)


@pytest.mark.slow
def test_the_runner_inside_a_launcher_trains_as_stock(folder: Path) -> None:
    command = f"{ACCELERATE} -m hf_moe_ep.run --ep-size 2 {SCRIPT}".split()
    printed = run_stock([*command, *make_options("inside", STOCK_BATCH // RANKS)], folder)
    assert printed.count("hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2)") == 1
    assert_same_training(folder / "inside", folder / "stock")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_train_as_stock(tied: bool, tmp_path: Path) -> None:
    """Each rank reads only the layers of its stage, and both ranks share a batch."""
    tiny(dtype=torch.float32, tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    write_launch_config(tmp_path)
    run_stock([sys.executable, SCRIPT, *make_options("stock", STOCK_BATCH)], tmp_path)
    command = f"{ACCELERATE} -m hf_moe_ep.run --pp-size 2 {SCRIPT}".split()
    printed = run_stock([*command, *make_options("stages", STOCK_BATCH)], tmp_path)
    assert printed.count("hf-moe-ep run: patched Qwen3MoeForCausalLM (--pp-size 2)") == 1
    assert_same_training(tmp_path / "stages", tmp_path / "stock")


@pytest.mark.slow
def test_a_launch_without_fsdp_names_what_is_missing(folder: Path) -> None:
    """The error comes before the first step, where the Trainer moves the model to its device."""
    command = f"{sys.executable} {SCRIPT} --spawn {RANKS}".split()
    with pytest.raises(AssertionError, match=r"never sharded: every process would train alone"):
        run_ours(
            [*command, *make_options("ddp", STOCK_BATCH // RANKS)], folder, MASTER_PORT="29777"
        )
    assert not (folder / "ddp").exists()
