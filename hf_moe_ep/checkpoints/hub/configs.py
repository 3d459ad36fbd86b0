"""Save config.json and the other files that describe a model, so that a kill truncates none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_moe_ep.checkpoints.storage.switch import settle
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.hub import save_code
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import get_stock_class

CONFIG = "config.json"
CONFIGS = (CONFIG, "generation_config.json")
TEMPORARY_CONFIGS = ".configs-"


def save_configs(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Save config.json and generation_config.json.

    The Python files of a model that was loaded with `trust_remote_code=True` are saved as well.
    Each file is written into a temporary folder and then renamed, so a kill leaves the old or the
    new version of each file.

    Args:
        dtype: the dtype to write into config.json; by default, the dtype of the model's config.
    """
    publish(prepare_configs(model, folder, dtype, ()), folder)


def prepare_configs(
    model: Any, folder: Path, dtype: torch.dtype | None, processors: Iterable[Any]
) -> Path:
    """Save the files of `save_configs`, tokenizers and processors into a new subfolder.

    `publish` later moves these files into the folder.
    """
    with stage_files(folder) as staged:
        _write_configs(model, staged, dtype, processors)
    return staged


@contextmanager
def stage_files(folder: Path) -> Iterator[Path]:
    """Make a new subfolder for files that are moved to `folder` later; an error removes it.

    Before that, the commit of a killed save is completed or undone (`storage/switch.py`), and the
    temporary files of that save are removed.
    """
    settle(folder)
    for leftover in folder.glob(f"{TEMPORARY_CONFIGS}*"):
        shutil.rmtree(leftover)
    staged = Path(tempfile.mkdtemp(prefix=TEMPORARY_CONFIGS, dir=folder))
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged)
        raise


def publish(staged: Path, folder: Path) -> None:
    """Move every file of `staged` to `folder` by a rename, and remove `staged`."""
    for file in staged.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(staged)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
    shutil.rmtree(staged)


def _write_configs(
    model: Any, folder: Path, dtype: torch.dtype | None, processors: Iterable[Any]
) -> None:
    model = without_adapters(unwrap(model))
    original = model.config.dtype, model.config.architectures
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    kind = get_stock_class(type(model))
    model.config.architectures = [kind.__name__]
    try:
        save_code(kind, model.config, folder)
        model.config.save_pretrained(folder)
    finally:
        model.config.dtype, model.config.architectures = original
    if model.can_generate():
        # GenerationConfig.save_pretrained raises an error for settings about which generate() only
        # warns (a temperature without do_sample). Such settings must not end a training run.
        path = folder / CONFIGS[1]
        model.generation_config.to_json_file(path, keys_to_pop=["compile_config"])
    for processor in processors:
        processor.save_pretrained(folder)
