"""Convert a training checkpoint to a checkpoint in the hub's layout, in one process.

    out/checkpoint-300             saved by the Trainer or Accelerate: pytorch_model_fsdp_0 (DCP)
    out/step-300                   saved by save_checkpoint: tensors/ (safetensors, readable by DCP)
    out/step-300 -> out/model      config, tokenizer, shards, index, as save_pretrained writes them

One tensor is in memory at a time, whatever number of ranks wrote it. If the checkpoint has a
manifest, the files that are read are compared with its hashes first. The model is written into a
folder next to the target, which is renamed to the target when everything is on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hf_moe_ep.checkpoints.hub.configs import CONFIG, save_configs
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.read import described_model
from hf_moe_ep.checkpoints.hub.write import (
    first_dtype,
    group_tensors,
    parse_size,
    saved_dtype,
    split_files,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import (
    check_can_appear,
    partial_folder,
    sha256_of,
    whole_folder,
)
from hf_moe_ep.checkpoints.storage.boxes import Box, whole
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader, ValuesPlanner
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.folder import STATE, TENSORS
from hf_moe_ep.upstream.hub import progress_bar

_OF_ACCELERATE = "pytorch_model_fsdp_0"
_PREFIX = "model."
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".h5", ".onnx")
# Accelerate's random_states_0.pkl and custom_checkpoint_0.pkl. No file of a model is a pickle.
_PICKLES = (".pkl", ".pickle")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    check_hashes: bool = True,
) -> int:
    """Write the model of a training checkpoint in the hub's layout; returns its size in bytes.

    Args:
        source: a folder that the Trainer, `accelerator.save_state` or `save_checkpoint` wrote.
        target: a folder that is missing or empty; it appears complete or not at all.
        config: the folder of the model that was trained, for its config and tokenizer; None if
            `source` has a config.json.
        dtype: the dtype of the saved weights; None is the dtype that the config names.
        max_shard_size: the largest size of a file, in bytes or as text like "5GB".
        check_hashes: compare the files that are read with the hashes in the manifest of `source`,
            which reads them twice. A checkpoint without a manifest cannot be compared.

    Raises:
        ValueError: `source` is no training checkpoint, is damaged, holds adapters only, or does not
            fit the config; `target` is not free or lies inside `source`; the disk has too little
            room.
    """
    folder, out = Path(source), Path(target).resolve()
    check_can_appear(out)
    max_bytes = parse_size(max_shard_size)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name that of a training checkpoint")
    described = Path(config) if config is not None else folder
    for read in (folder, described):
        if read.resolve() in (out, *out.parents):
            raise ValueError(f"target {target} lies in {read}, which is read; name another folder")
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
    if not (described / CONFIG).is_file():
        raise ValueError(f"{described} has no {CONFIG}; name the model's folder with --config")
    reader, metadata = _open(folder)
    model, plan = described_model(described)
    wanted = dtype or next(p.dtype for p in model.parameters())
    tensors = distinct_tensors(model)
    groups = group_tensors(
        model,
        plan,
        tensors,
        lambda _, tensor: saved_dtype(tensor, wanted),
        lambda name, _: _slabs(reader, metadata, name),
    )
    _check_fits(folder, model, metadata)
    small = [file for file in described.iterdir() if file.is_file() and is_of_model(file)]
    size = sum(group.num_bytes for group in groups)
    check_room(out, size + sum(file.stat().st_size for file in small))
    if check_hashes and manifest.is_ours(folder):
        _check_files_read(folder, [file.name for file in small] if described == folder else [])
    with whole_folder(out) as written:
        for file in small:
            shutil.copy2(file, written)
        save_configs(model, written, first_dtype(groups), ())
        for file in written.iterdir():
            with file.open("rb") as copied:
                os.fsync(copied.fileno())
        what = f"converting into {target}"
        write_checkpoint(written, split_files(groups, max_bytes), what=what)
    return size


def _check_files_read(folder: Path, small: list[str]) -> None:
    """Compare the weights and the files `small` of a checkpoint with the hashes in its manifest.

    The optimizer state, the larger part of a checkpoint, is not read.
    """
    weights = f"{_OF_ACCELERATE if (folder / _OF_ACCELERATE).is_dir() else TENSORS}/"
    files = {
        name: entry
        for name, entry in manifest.read(folder)["files"].items()
        if name.startswith(weights) or name in small
    }
    size = sum(entry["size"] for entry in files.values())
    with progress_bar(size, f"checking {folder}", True) as progress:
        for name, entry in files.items():
            found = sha256_of(folder / name, progress.update)
            if found != entry["sha256"]:
                raise ValueError(
                    f"{folder / name} has changed since it was written: sha256 {found}, "
                    f"{manifest.MANIFEST} says {entry['sha256']}; convert an older checkpoint"
                )


def check_room(out: Path, needed: int) -> None:
    """Raise ValueError if the disk of the folder `out` has less than `needed` bytes free."""
    there = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        old = left_behind(out)
        raise ValueError(
            f"{out} needs {needed:,} bytes, and {there} has room for {free:,}; make room, or name "
            f"another disk" + (f"; {old} is left from a killed run, delete it" if old else "")
        )


def left_behind(out: Path) -> str:
    """List the folders that killed runs left next to `out`, as text; "" if there are none."""
    names = os.listdir(out.parent) if out.parent.is_dir() else []
    found = [name for name in names if name.startswith(partial_folder(out))]
    return ", ".join(os.fspath(out.parent / name) for name in sorted(found))


def _open(folder: Path) -> tuple[Any, Metadata]:
    """Return DCP's reader of a checkpoint and the metadata of the checkpoint."""
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
    # Every load asks for the metadata; reading thousands of headers takes longer than the data.
    reader.read_metadata = lambda *_, **__: metadata
    return reader, metadata


def _key(name: str, metadata: Metadata) -> str | None:
    """Return the key of a tensor; Accelerate adds one more "model." prefix."""
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
            f"writes the adapter, then merge it: hf-moe-ep merge-adapter BASE ADAPTER OUT"
        )
    if (folder / BASE).exists():
        raise ValueError(
            f"{folder} is of a run whose experts were held quantised, and holds none of them; load "
            f"it into that model, or use the checkpoint of experts that the run began with"
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
    load({key: tensor}, storage_reader=reader, planner=ValuesPlanner(), no_dist=True)
    yield from whole(tensor)


def is_of_model(file: Path) -> bool:
    """Tell whether a file describes a model: it holds no weights and no state of a training run."""
    ours = (manifest.MANIFEST, manifest.STARTED, STATE, "trainer_state.json", INDEX)
    of_run = file.name in ours or file.name.startswith(("random-", "rng_state", "adapter_"))
    return file.suffix not in (*_WEIGHTS, *_PICKLES) and not of_run
