"""axolotl trains on two ranks, by `hf-moe-ep run` or the plugin, as stock does in one process.

The configuration is examples/trainers/axolotl.yaml with a tiny model. Losses, gradient norms (with
clipping) and saved tensors of six steps are compared. Both runs use tests/support/trainers_on_cpu.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.adapters import ATTENTION, EXPERTS, with_lora
from support.commands import (
    MODEL,
    ON_CPU,
    RANKS,
    SAMPLES,
    STEPS,
    STOCK_BATCH,
    assert_adapts_experts,
    assert_same_log,
    assert_same_tensors,
    assert_same_training,
    read_saved_tensors,
    read_training_log,
    run_ours,
    run_stock,
)
from support.trainer_configs import Config, make_config, write_config
from transformers import AutoModelForCausalLM

pytest.importorskip("axolotl", "0.19", reason="needs axolotl 0.19 or newer (make test-trainers)")

PLUGIN = ("plugins", "hf_moe_ep")
FSDP = ("fsdp_version", "fsdp_config")
LAUNCH = ("--launcher", "torchrun", "--", "--nproc_per_node", str(RANKS))
MIDDLE = STEPS // 2
PATCHED = "hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2"
# Six steps with batches of four samples.
EPOCHS: Config = {
    "max_steps": None,
    "num_epochs": STEPS * STOCK_BATCH / SAMPLES,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.5,
}
# axolotl shuffles packed samples with the random state of the process, so the order is fixed here.
PACKING: Config = {
    "sample_packing": True,
    "pad_to_sequence_len": True,
    "curriculum_sampling": True,
}
# axolotl attaches new adapters before it sets the seed, so their values differ between runs. Both
# runs therefore start from an adapter on disk.
ADAPTER = "adapter_of_before"
LORA: Config = {
    "adapter": "lora",
    "lora_model_dir": ADAPTER,
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": list(ATTENTION),
    "lora_target_parameters": list(EXPERTS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = commands.make_inputs(tmp_path_factory.mktemp("axolotl"))
    model = AutoModelForCausalLM.from_pretrained(folder / MODEL)
    with_lora(model, r=4, seed=1, task_type="CAUSAL_LM").save_pretrained(folder / ADAPTER)
    return folder


def make_axolotl_config(output: str, **changes: Any) -> Config:
    """Return the example's configuration for the tiny model. A change to None removes a key."""
    return make_config("axolotl", output, dataset_prepared_path=f"prepared_{output}", **changes)


def train_stock(folder: Path, output: str, **changes: Any) -> Path:
    """Train in one process without hf_moe_ep and FSDP. Returns the output folder."""
    config = make_axolotl_config(output, **(dict.fromkeys((*PLUGIN, *FSDP)) | changes))
    command = ["axolotl", "train", write_config(config, folder), "--launcher", "python"]
    run_stock(command, folder, f"{output}.txt", PYTHONPATH=ON_CPU)
    return folder / output


@pytest.fixture(scope="module")
def stock_full(folder: Path) -> Path:
    return train_stock(folder, "stock_full")


def make_our_config(
    folder: Path, output: str, *, fsdp: Config | None = None, **changes: Any
) -> Config:
    """Return a configuration for two ranks.

    Args:
        fsdp: changed keys of fsdp_config.
        changes: changed keys of the configuration.
    """
    config = make_axolotl_config(output, micro_batch_size=STOCK_BATCH // RANKS, **changes)
    return config | {"fsdp_config": config["fsdp_config"] | (fsdp or {})}


def train_by_runner(config: Config, folder: Path, *options: str) -> str:
    """Train by `hf-moe-ep run` with `options`, without our plugin. Returns the output."""
    stock_keys = {key: value for key, value in config.items() if key not in PLUGIN}
    if others := [name for name in config["plugins"] if not name.startswith("hf_moe_ep")]:
        stock_keys["plugins"] = others
    command = ["axolotl", "train", write_config(stock_keys, folder), *LAUNCH]
    output = f"{config['output_dir']}.txt"
    printed = run_ours(command, folder, *options, output=output, PYTHONPATH=ON_CPU)
    assert printed.count(PATCHED) == 1
    card = (folder / config["output_dir"] / "README.md").read_text()
    assert "hf_moe_ep" not in card and "hf-moe-ep" not in card
    return printed


def train_by_plugin(config: Config, folder: Path) -> str:
    """Train by the plugin without `hf-moe-ep run`. Returns the output."""
    config = config | {"hf_moe_ep": config["hf_moe_ep"] | {"ep_size": 2}}
    command = ["axolotl", "train", write_config(config, folder), *LAUNCH]
    printed = run_stock(command, folder, f"{config['output_dir']}.txt", PYTHONPATH=ON_CPU)
    assert PATCHED not in printed
    assert "layout     2 ranks = dp_replicate 1 x ep_fsdp 1 x ep 2" in printed
    return printed


def assert_has_report(printed: str, output: Path) -> None:
    """Check that the report has the layout, the speed and the load of experts."""
    assert "layout     2 ranks = dp_replicate 1 x ep_fsdp 1 x ep 2" in printed
    assert all(entry["tokens_per_second"] > 0 for entry in read_training_log(output))
    assert all(entry["expert_load/worst_layer"] >= 1 for entry in read_training_log(output))


def test_the_runner_trains_as_stock(folder: Path, stock_full: Path) -> None:
    config = make_our_config(folder, "full", fsdp={"cpu_ram_efficient_loading": False})
    printed = train_by_runner(config, folder)
    assert "sharding will read its layers from" in printed
    assert_same_training(folder / "full", stock_full)
    assert_has_report(printed, folder / "full")


@pytest.mark.parametrize("train", [train_by_runner, train_by_plugin])
def test_axolotls_kernels_plugin_without_a_kernel_changes_nothing(
    train: Callable[[Config, Path], str], folder: Path, stock_full: Path
) -> None:
    """The plugin sets `experts_implementation: eager`, which axolotl passes to the model."""
    output = f"kernels_{train.__name__}"
    config = make_our_config(folder, output)
    config["plugins"] = [*config["plugins"], "axolotl.integrations.kernels.KernelsPlugin"]
    train(config, folder)
    assert_same_training(folder / output, stock_full)


def test_ligers_plugin_beside_ours_leaves_the_experts_to_hf_moe_ep(
    folder: Path, stock_full: Path
) -> None:
    """Liger's experts need a GPU, so this run would fail if it called them."""
    config = make_our_config(folder, "liger", liger_glu_activation=True)
    config["plugins"] = ["axolotl.integrations.liger.LigerPlugin", *config["plugins"]]
    printed = train_by_plugin(config, folder)
    assert "Applying LIGER to qwen3_moe" in printed and "'swiglu': True" in printed
    assert_same_training(folder / "liger", stock_full)


def test_an_expert_backend_of_axolotl_is_refused(folder: Path) -> None:
    """axolotl's configuration turns `expert_backend` into `use_scattermoe`, which we read."""
    config = make_our_config(folder, "backend", expert_backend="scattermoe")
    config["plugins"] = [*config["plugins"], "axolotl.integrations.kernels.KernelsPlugin"]
    command = ["axolotl", "train", write_config(config, folder), "--launcher", "python"]
    with pytest.raises(AssertionError, match="exit code 1 ") as error:
        run_stock(command, folder, PYTHONPATH=ON_CPU)
    assert "use_scattermoe: True would replace the experts of hf_moe_ep" in str(error.value)


@pytest.mark.parametrize(
    ("train", "resume"),
    [(train_by_plugin, train_by_runner), (train_by_runner, train_by_plugin)],
)
def test_one_way_trains_and_the_other_resumes_as_stock(
    train: Callable[[Config, Path], str],
    resume: Callable[[Config, Path], str],
    folder: Path,
    stock_full: Path,
) -> None:
    """The run uses lean loading, activation checkpointing and sharded state dicts."""
    fsdp = {
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    first, second = f"sharded_{train.__name__}", f"resumed_{resume.__name__}"
    config = make_our_config(folder, first, fsdp=fsdp, save_steps=MIDDLE)
    assert_has_report(train(config, folder), folder / first)
    assert_same_training(folder / first, stock_full)
    middle = f"{first}/checkpoint-{MIDDLE}"
    resume(config | {"output_dir": second, "resume_from_checkpoint": middle}, folder)
    assert_same_log(read_training_log(folder / second), read_training_log(stock_full))
    assert_same_tensors(read_saved_tensors(folder / second), read_saved_tensors(stock_full))


@pytest.mark.parametrize("train", [train_by_runner, train_by_plugin])
def test_packed_samples_train_as_stock(
    train: Callable[[Config, Path], str], folder: Path, stock_packing: Path
) -> None:
    output = f"packing_{train.__name__}"
    train(make_our_config(folder, output, **PACKING), folder)
    assert_same_training(folder / output, stock_packing)


@pytest.fixture(scope="module")
def stock_packing(folder: Path) -> Path:
    """Stock accumulates batches of two rows, because axolotl packs batches of four differently."""
    batches = {"micro_batch_size": STOCK_BATCH // RANKS, "gradient_accumulation_steps": RANKS}
    return train_stock(folder, "stock_packing", **batches, **PACKING)


@pytest.mark.parametrize("by_plugin", [False, True])
def test_epochs_of_ranks_that_share_batches_have_the_steps_of_stock(
    by_plugin: bool, folder: Path, stock_epochs: Path
) -> None:
    """axolotl counts a batch for each rank, so it would stop after half of the samples."""
    output = f"epochs_{by_plugin}"
    sizes = {"ep_size": 2, "sp_size": 2}
    config = make_our_config(folder, output, **EPOCHS, hf_moe_ep=sizes)
    config |= {"micro_batch_size": STOCK_BATCH}
    if by_plugin:
        train_by_plugin(config, folder)
    else:
        train_by_runner(config, folder, "--sp-size", "2")
    assert_same_training(folder / output, stock_epochs)
    got, want = (read_training_log(path) for path in (folder / output, stock_epochs))
    for key in ("epoch", "learning_rate"):
        assert [entry[key] for entry in got] == [entry[key] for entry in want]


@pytest.fixture(scope="module")
def stock_epochs(folder: Path) -> Path:
    return train_stock(folder, "stock_epochs", **EPOCHS)


@pytest.mark.parametrize("train", [train_by_runner, train_by_plugin])
def test_lora_trains_and_merges_as_stock(
    train: Callable[[Config, Path], str], folder: Path, stock_lora: Path
) -> None:
    output = f"lora_{train.__name__}"
    config = make_our_config(folder, output, **LORA)
    train(config, folder)
    assert_same_training(folder / output, stock_lora)
    assert_adapts_experts(folder / output)
    if train is train_by_plugin:
        merged = merge_adapter(f"{output}.yaml", folder)
        assert_same_tensors(merged, merge_adapter("stock_lora.yaml", folder))


@pytest.fixture(scope="module")
def stock_lora(folder: Path) -> Path:
    return train_stock(folder, "stock_lora", **LORA)


def merge_adapter(config: str, folder: Path) -> dict[str, Any]:
    """Run axolotl merge-lora. Returns the tensors of the merged model."""
    output = config.removesuffix(".yaml")
    command = ["axolotl", "merge-lora", config, f"--lora-model-dir={output}"]
    run_stock(command, folder, "merge.txt", PYTHONPATH=ON_CPU)
    return read_saved_tensors(folder / output / "merged")


def test_a_wrong_section_is_reported_by_axolotls_validation(folder: Path) -> None:
    """The error comes before a model or data is loaded."""
    config = make_our_config(folder, "wrong", hf_moe_ep={"ep_sise": 2})
    command = ["axolotl", "train", write_config(config, folder), "--launcher", "python"]
    with pytest.raises(AssertionError, match="exit code 1 ") as error:
        run_stock(command, folder, PYTHONPATH=ON_CPU)
    assert "unknown option ep_sise (did you mean ep_size?); options are: " in str(error.value)
    assert not (folder / "wrong").exists()
