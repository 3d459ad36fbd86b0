"""config.json and what else describes a model beside its weights, saved whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hf_moe_ep.checkpoints.hub.switch import settle
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import stock_class

CONFIG = "config.json"
CONFIGS = (CONFIG, "generation_config.json")
BESIDE = ".configs-"


def save_configs(
    model: Any, folder: Path, dtype: torch.dtype | None = None, others: Iterable[Any] = ()
) -> None:
    """Save config.json, generation_config.json, tokenizers, processors (modeling_utils.py).

    `dtype` is what the config will say, None leaves it. Each file is written beside its place and
    renamed: a process killed here leaves the old one or the new one.
    """
    publish(stage_configs(model, folder, dtype, others), folder)


def stage_configs(
    model: Any, folder: Path, dtype: torch.dtype | None = None, others: Iterable[Any] = ()
) -> Path:
    """Save them into a folder in `folder` that `publish` empties into it.

    What a killed process has left of an earlier save is put in order first.
    """
    settle(folder)
    for left_behind in folder.glob(f"{BESIDE}*"):
        shutil.rmtree(left_behind)
    beside = Path(tempfile.mkdtemp(prefix=BESIDE, dir=folder))
    try:
        _write_into(model, beside, dtype, others)
    except BaseException:
        shutil.rmtree(beside)
        raise
    return beside


def publish(beside: Path, folder: Path) -> None:
    """Rename every file of `beside` into its place in `folder`."""
    for file in beside.rglob("*"):
        if file.is_file():
            place = folder / file.relative_to(beside)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)
    shutil.rmtree(beside)


def _write_into(model: Any, folder: Path, dtype: torch.dtype | None, others: Iterable[Any]) -> None:
    model = without_adapters(unwrap(model))
    kept = model.config.dtype, model.config.architectures
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [stock_class(type(model)).__name__]
    try:
        model.config.save_pretrained(folder)
    finally:
        model.config.dtype, model.config.architectures = kept
    if model.can_generate():
        # Not by its save_pretrained, which refuses what generate() and loading only warn of (a
        # temperature without do_sample): a run must not end with its first checkpoint for that.
        path = folder / CONFIGS[1]
        model.generation_config.to_json_file(path, keys_to_pop=["compile_config"])
    for other in others:
        other.save_pretrained(folder)
