"""From a training checkpoint to a checkpoint of the hub, in one process; and is either whole?

    out/checkpoint-300             the Trainer's or Accelerate's: pytorch_model_fsdp_0, by DCP
    out/step-300                   of save_checkpoint: tensors/, safetensors by DCP
    out/step-300 -> out/model      config, tokenizer, shards, index, as save_pretrained writes them

One tensor is in memory at a time, whatever number of ranks wrote it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hf_moe_ep.architectures import find_plan
from hf_moe_ep.checkpoints.hub.configs import save_configs
from hf_moe_ep.checkpoints.hub.pieces import describe, hub_pieces
from hf_moe_ep.checkpoints.hub.read import find_weights
from hf_moe_ep.checkpoints.hub.save import distinct_tensors
from hf_moe_ep.checkpoints.hub.write import (
    HASHES,
    Source,
    first_dtype,
    parse_size,
    split_files,
    whole,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import sha256_of
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, Box, read_index
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.hub import empty_model, file_name

_OF_ACCELERATE, _OURS = "pytorch_model_fsdp_0", "tensors"
_PREFIX = "model."
_CONFIG = "config.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".distcp")


@dataclass(frozen=True)
class Found:
    """What a folder holds: a sentence, then facts by name."""

    what: str
    facts: dict[str, str]


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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"target {out} exists and is not empty; name another folder")
    if (folder / manifest.MANIFEST).exists() or (folder / manifest.STARTED).exists():
        manifest.check_sizes(folder)
    described = Path(config) if config is not None else folder
    if not (described / _CONFIG).is_file():
        raise ValueError(f"{described} has no {_CONFIG}; name the model's folder with --config")
    reader, metadata = _open(folder)
    model, plan = _empty(described)
    wanted = dtype or next(p.dtype for p in model.parameters())
    sources = [
        _source(name, tensor, plan, wanted, partial(_slabs, reader, metadata, name))
        for name, tensor in distinct_tensors(model).items()
    ]
    _check_fits(folder, model, metadata)
    out.mkdir(parents=True, exist_ok=True)
    for file in described.iterdir():
        if file.is_file() and file.suffix not in _NOT_COPIED and _is_of_model(file.name):
            shutil.copy2(file, out)
    save_configs(model, out, first_dtype(sources), ())
    write_checkpoint(out, split_files(sources, parse_size(max_shard_size)))
    return sum(source.bytes for source in sources)


def verify(folder: str | os.PathLike[str]) -> Found:
    """Read every file of a checkpoint of either kind, and check it against all that is known of it.

    Raises:
        ValueError: it names the file or the tensors: missing, truncated, changed, misshapen.
    """
    path = Path(folder)
    if (path / manifest.MANIFEST).exists() or (path / manifest.STARTED).exists():
        manifest.check(path)
        files = manifest.read(path)["files"]
        size = sum(entry["size"] for entry in files.values())
        return Found("complete", {"files": f"{len(files)}, all hashes right", "bytes": f"{size:,}"})
    entries = read_index(path)
    facts = {"tensors": f"{len(entries)}, files as long as their headers say"}
    if (path / _CONFIG).is_file():
        model, plan = _empty(path)
        find_weights(model, path, plan, [name for name, _ in model.named_parameters()])
        facts["shapes"] = f"those of {type(model).__name__}"
    hashes: dict[str, str] = {}
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text("utf-8"))
        # Of files that are read: a model.safetensors of stock hides the index that it leaves.
        read = {entry.file.name for entry in entries.values()}
        known = index.get("metadata", {}).get(HASHES, {})
        hashes = {name: digest for name, digest in known.items() if name in read}
    for name, digest in hashes.items():
        found = sha256_of(path / name)
        if found != digest:
            raise ValueError(
                f"{path / name} has changed since it was written: sha256 {found}, {INDEX} says "
                f"{digest}"
            )
    facts["hashes"] = f"{len(hashes)} files, all right" if hashes else "none are known"
    return Found("whole", facts)


def look(folder: str | os.PathLike[str]) -> Found:
    """What wrote a checkpoint, and at which layout; nothing but headers is read."""
    path = Path(folder)
    if (path / manifest.MANIFEST).exists() or (path / manifest.STARTED).exists():
        found = manifest.read(path)
        facts = {name: str(value) for name, value in found["layout"].items()}
        facts |= {name: str(value) for name, value in found["written"].items()}
        facts["bytes"] = f"{sum(entry['size'] for entry in found['files'].values()):,}"
        return Found("a training checkpoint, complete as far as sizes tell", facts)
    entries = read_index(path)
    size = sum(e.dtype.itemsize * torch.Size(e.shape).numel() for e in entries.values())
    facts = {
        "tensors": str(len(entries)),
        "files": str(len({entry.file for entry in entries.values()})),
        "dtypes": ", ".join(sorted({str(entry.dtype) for entry in entries.values()})),
        "bytes": f"{size:,}",
    }
    return Found("a model in safetensors files", facts)


def _empty(folder: Path) -> tuple[nn.Module, ModelPlan]:
    model = empty_model(folder, None, torch.get_default_dtype, {})
    return model, find_plan(model)[0]


def _open(folder: Path) -> tuple[Any, Metadata]:
    """DCP's reader of a checkpoint, and its metadata."""
    if (folder / _OF_ACCELERATE).is_dir():
        reader: Any = MetadataReader(folder / _OF_ACCELERATE)
    elif (folder / _OURS).is_dir():
        reader = HuggingFaceStorageReader(os.fspath(folder / _OURS))
    else:
        raise ValueError(
            f"{folder} is no training checkpoint: it has neither {_OF_ACCELERATE} (Trainer, "
            f"Accelerate, with fsdp_state_dict_type SHARDED_STATE_DICT) nor {_OURS} "
            f"(save_checkpoint)"
        )
    metadata: Metadata = reader.read_metadata()
    # Asked for by every load; of thousands of files that takes longer than the reading.
    reader.read_metadata = lambda *_, **__: metadata
    return reader, metadata


def _key(name: str, metadata: Metadata) -> str | None:
    """Accelerate nests what it saves once more."""
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
    problems = [describe("missing", missing), describe("misshapen", misshapen)]
    if any(problems):
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: {'; '.join(filter(None, problems))}"
        )


def _source(
    name: str,
    tensor: Tensor,
    plan: ModelPlan,
    dtype: torch.dtype,
    slabs: Callable[[], Iterator[tuple[Box, Tensor]]],
) -> Source:
    pieces = hub_pieces(file_name(name), tuple(tensor.shape), plan)
    return Source(pieces, dtype if tensor.is_floating_point() else tensor.dtype, slabs)


def _slabs(reader: Any, metadata: Metadata, name: str) -> Iterator[tuple[Box, Tensor]]:
    key = _key(name, metadata)
    assert key is not None
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
    load({key: tensor}, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    yield from whole(tensor)


def _is_of_model(name: str) -> bool:
    """Not what a training run leaves beside the model."""
    ours = (manifest.MANIFEST, manifest.STARTED, "state.json", "trainer_state.json", INDEX)
    return name not in ours and not name.startswith(("random-", "rng_state", "adapter_"))
