"""Configurations of other trainers for a tiny model, which tests and a benchmark change.

They are the files of examples/trainers with settings for the model and the data of `make_inputs`,
for comparable runs, and for features that the CPU lacks.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from support.commands import MAX_GRAD_NORM, MODEL, STEPS, STOCK_BATCH
from support.scripts import ROOT

Config = dict[str, Any]

_AXOLOTL: Config = {
    "base_model": MODEL,
    "datasets": [{"path": "chat/train.jsonl", "ds_type": "json", "type": "chat_template"}],
    "shuffle_merged_datasets": False,
    "dataset_num_proc": 1,
    "sequence_len": 128,
    "sample_packing": False,
    "pad_to_sequence_len": False,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "optimizer": "adamw_torch",
    "micro_batch_size": STOCK_BATCH,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "max_grad_norm": MAX_GRAD_NORM,
    "max_steps": STEPS,
    "save_steps": STEPS,
    "val_set_size": 0,
    "seed": 3,
}

_MS_SWIFT: Config = {
    "model": MODEL,
    "model_type": "qwen3_moe",
    "template": "chatml",
    "dataset": "chat/train.jsonl",
    "split_dataset_ratio": 0,
    "dataset_shuffle": False,
    "train_dataloader_shuffle": False,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "max_length": 128,
    "use_cpu": True,
    "torch_dtype": "float32",
    "bf16": False,
    "fp16": False,
    "optim": "adamw_torch",
    "gradient_checkpointing": False,
    "per_device_train_batch_size": STOCK_BATCH,
    "per_device_eval_batch_size": STOCK_BATCH,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_grad_norm": MAX_GRAD_NORM,
    "max_steps": STEPS,
    "save_steps": STEPS,
    "report_to": "none",
    "add_version": False,
    "seed": 3,
}

_LLAMA_FACTORY: Config = {
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

_TINY = {"axolotl": _AXOLOTL, "ms_swift": _MS_SWIFT, "llama_factory": _LLAMA_FACTORY}


def find_example(trainer: str) -> Path:
    """Return the path of the trainer's example, such as examples/trainers/axolotl.yaml."""
    return ROOT / "examples" / "trainers" / f"{trainer}.yaml"


def make_config(trainer: str, output: str, **changes: Any) -> Config:
    """Return the example's configuration for the tiny model. A change to None removes a key."""
    config = yaml.safe_load(find_example(trainer).read_text()) | _TINY[trainer]
    config |= {"output_dir": output} | changes
    return {key: value for key, value in config.items() if value is not None}


def write_config(config: Config, folder: Path) -> str:
    """Write a configuration, and return the name of its file in `folder`."""
    name = f"{config['output_dir']}.yaml"
    (folder / name).write_text(yaml.safe_dump(config))
    return name


def write_alpaca_data(folder: Path) -> None:
    """Write the conversations of `make_inputs` in the format of Alpaca, for LLaMA-Factory."""
    lines = []
    for line in (folder / "chat/train.jsonl").open():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        lines.append(json.dumps({"instruction": question, "input": "", "output": answer}) + "\n")
    # The example's `dataset_dir: ONLINE` loads a folder like a data set of the hub.
    (folder / "alpaca").mkdir()
    (folder / "alpaca/train.jsonl").write_text("".join(lines))
