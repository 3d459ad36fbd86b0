"""From a training checkpoint to a checkpoint of the hub, in one process.

    out/checkpoint-300             the Trainer's or Accelerate's: pytorch_model_fsdp_0, by DCP
    out/step-300                   of save_checkpoint: tensors/, safetensors by DCP
    out/step-300 -> out/model      config, tokenizer, shards, index, as save_pretrained writes them

One tensor is in memory at a time, whatever number of ranks wrote it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hf_moe_ep.checkpoints.hub.configs import CONFIG, save_configs
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.read import described_model
from hf_moe_ep.checkpoints.hub.write import (
    first_dtype,
    parse_size,
    saved_dtype,
    sources_of,
    split_files,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import check_is_free
from hf_moe_ep.checkpoints.storage.boxes import Box, whole
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.folder import STATE, TENSORS

_OF_ACCELERATE = "pytorch_model_fsdp_0"
_PREFIX = "model."
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".h5", ".onnx")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> int:
    """Write the model of a training checkpoint in hub layout; returns the bytes of its tensors.

    Args:
        source: folder of the Trainer, of `accelerator.save_state` or of `save_checkpoint`.
        target: missing or empty.
        config: folder of the model that was trained, for its config and tokenizer; None where
            `source` has a config.json.
        dtype: None is the one that the config names.

    Raises:
        ValueError: no such checkpoint; one of adapters alone; damaged; it does not fit the config.
    """
    folder, out = Path(source), Path(target)
    check_is_free(out)
    max_bytes = parse_size(max_shard_size)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name that of a training checkpoint")
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
    described = Path(config) if config is not None else folder
    if not (described / CONFIG).is_file():
        raise ValueError(f"{described} has no {CONFIG}; name the model's folder with --config")
    reader, metadata = _open(folder)
    model, plan = described_model(described)
    wanted = dtype or next(p.dtype for p in model.parameters())
    tensors = distinct_tensors(model)
    sources = sources_of(
        model,
        plan,
        tensors,
        lambda _, tensor: saved_dtype(tensor, wanted),
        lambda name, _: _slabs(reader, metadata, name),
    )
    _check_fits(folder, model, metadata)
    out.mkdir(parents=True, exist_ok=True)
    for file in described.iterdir():
        if file.is_file() and is_of_model(file):
            shutil.copy2(file, out)
    save_configs(model, out, first_dtype(sources), ())
    write_checkpoint(out, split_files(sources, max_bytes))
    return sum(source.bytes for source in sources)


def _open(folder: Path) -> tuple[Any, Metadata]:
    """Return DCP's reader of a checkpoint, and its metadata."""
    if (folder / _OF_ACCELERATE).is_dir():
        reader: Any = MetadataReader(folder / _OF_ACCELERATE)
    elif (folder / TENSORS).is_dir():
        reader = HuggingFaceStorageReader(os.fspath(folder / TENSORS))
    else:
        raise ValueError(
            f"{folder} is no training checkpoint: it has neither {_OF_ACCELERATE} (Trainer, "
            f"Accelerate, with fsdp_state_dict_type SHARDED_STATE_DICT) nor {TENSORS} "
            f"(save_checkpoint)"
        )
    metadata: Metadata = reader.read_metadata()
    # Asked for by every load; of thousands of files that takes longer than the reading.
    reader.read_metadata = lambda *_, **__: metadata
    return reader, metadata


def _key(name: str, metadata: Metadata) -> str | None:
    """Find a tensor's key: Accelerate nests what it saves once more."""
    keys = (f"{_PREFIX}{name}", f"{_PREFIX}{_PREFIX}{name}", name)
    return next((key for key in keys if key in metadata.state_dict_metadata), None)


def _check_fits(folder: Path, model: nn.Module, metadata: Metadata) -> None:
    missing, misshapen = [], []
    for name, tensor in distinct_tensors(model).items():
        key = _key(name, metadata)
        if key is None:
            missing.append(name)
            continue
        saved = metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        if saved.size != tensor.shape:
            misshapen.append(f"{name} {tuple(saved.size)} instead of {tuple(tensor.shape)}")
    if any("lora_" in key for key in metadata.state_dict_metadata):
        raise ValueError(
            f"{folder} holds adapters; load it into the model and call save_pretrained, which "
            f"writes an adapter, or merge that in one process"
        )
    if (folder / BASE).exists():
        raise ValueError(
            f"{folder} is of a run whose experts were held quantised, and holds none of them; load "
            f"it into that model, or take them from the checkpoint that the run began with"
        )
    problems = [list_names("missing", missing), list_names("misshapen", misshapen)]
    if any(problems):
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: {'; '.join(filter(None, problems))}"
        )


def _slabs(reader: Any, metadata: Metadata, name: str) -> Iterator[tuple[Box, Tensor]]:
    key = _key(name, metadata)
    assert key is not None
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
    load({key: tensor}, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    yield from whole(tensor)


def is_of_model(file: Path) -> bool:
    """Tell a file that describes a model from weights, and what a training run leaves there."""
    ours = (manifest.MANIFEST, manifest.STARTED, STATE, "trainer_state.json", INDEX)
    of_run = file.name in ours or file.name.startswith(("random-", "rng_state", "adapter_"))
    return file.suffix not in _WEIGHTS and not of_run
