"""Convert a training checkpoint to a checkpoint in the hub's layout, in one process.

    folder  example              content
    source  out/checkpoint-300   saved by the Trainer or Accelerate: pytorch_model_fsdp_0, in the
                                 format of torch.distributed.checkpoint (DCP)
    source  out/step-300         saved by save_checkpoint: tensors/, safetensors that DCP can read
    target  out/model            config, tokenizer, shards, index, as save_pretrained writes them

`convert` holds one tensor in memory at a time, even if many ranks wrote its shards. If the
checkpoint has a manifest, the files are first compared with its hashes. The model is written into a
temporary folder next to the target, which is renamed to the target when all files are on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hf_moe_ep.checkpoints.hub.configs import CONFIG, save_configs
from hf_moe_ep.checkpoints.hub.extra import copy_groups, find_to_copy, get_known_digests
from hf_moe_ep.checkpoints.hub.head import add_empty_head
from hf_moe_ep.checkpoints.hub.layout import list_distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.read import build_model_from_config
from hf_moe_ep.checkpoints.hub.write import (
    choose_dtypes,
    get_first_dtype,
    group_tensors,
    parse_size,
    split_files,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import (
    check_folder_can_be_made,
    compute_sha256,
    get_partial_folder_prefix,
    make_folder_atomically,
)
from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader, ValuesPlanner
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.conversions import CONVERSIONS, read_conversions
from hf_moe_ep.checkpoints.training.extra import EXTRA, read_extra
from hf_moe_ep.checkpoints.training.folder import STATE, TENSORS, read_state
from hf_moe_ep.ranks.boxes import Box, iterate_whole_tensor
from hf_moe_ep.upstream.hub import make_progress_bar
from hf_moe_ep.upstream.module_names import get_canonical_name

_ACCELERATE_TENSORS = "pytorch_model_fsdp_0"
_PREFIX = "model."
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".distcp",
    ".gguf",
    ".h5",
    ".onnx",
)
# Accelerate's random_states_0.pkl and custom_checkpoint_0.pkl are not files of a model.
_PICKLE_SUFFIXES = (".pkl", ".pickle")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    check_hashes: bool = True,
    extra_tensors: bool = True,
    trust_remote_code: bool = False,
) -> int:
    """Write the model of a training checkpoint in the hub's layout; return its size in bytes.

    Args:
        source: a folder that the Trainer, `accelerator.save_state` or `save_checkpoint` wrote.
        target: a folder that is missing or empty; it appears complete or not at all.
        config: the folder of the model that was trained, which has the config and the tokenizer;
            None if `source` has a config.json.
        dtype: the dtype of the saved weights. By default, each tensor is saved in the dtype in
            which `from_pretrained` loads it: the dtype that the config names, or fp32 for tensors
            that the class keeps in fp32, such as correction biases. No `dtype` rounds these
            tensors.
        max_shard_size: the largest size of a file, in bytes or as text like "5GB".
        check_hashes: compare the files with the hashes in the manifest of `source` before they are
            converted. Each file is then read twice. A source without a manifest is not checked.
        extra_tensors: copy the tensors that the model's class ignores from the checkpoint that the
            run had loaded; extra_tensors.json in `source` says where this checkpoint is.
        trust_remote_code: run the Python files beside the config if it names a class in them.

    Raises:
        ValueError: `source` is not a training checkpoint, is damaged, holds only adapters, or does
            not fit the config; `target` is not empty or lies inside `source`; the files of the
            extra tensors are gone or have changed; the disk has too little free space.
    """
    folder, out = Path(source), Path(target).resolve()
    check_folder_can_be_made(out)
    max_bytes = parse_size(max_shard_size)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder of a training checkpoint")
    config_folder = Path(config) if config is not None else folder
    for source_folder in (folder, config_folder):
        if source_folder.resolve() in (out, *out.parents):
            raise ValueError(
                f"target {target} lies in {source_folder}, which is read; name another folder"
            )
    if manifest.is_ours(folder):
        manifest.check_sizes(folder)
    if not (config_folder / CONFIG).is_file():
        raise ValueError(f"{config_folder} has no {CONFIG}; name the model's folder with --config")
    reader, metadata = _open_checkpoint(folder)
    has_state = manifest.is_ours(folder) and (folder / STATE).is_file()
    scalars = read_state(folder).scalars if has_state else {}
    model, plan = build_model_from_config(config_folder, trust_remote_code=trust_remote_code)
    read_conversions(model, folder / CONVERSIONS)
    add_empty_head(model, plan, metadata.state_dict_metadata)
    tensors = list_distinct_tensors(model)
    keys = _find_keys(model, metadata)
    groups = group_tensors(
        model,
        plan,
        tensors,
        choose_dtypes(model, dtype, {}),
        lambda name, _: _read_slabs(reader, metadata, scalars, keys, name),
    )
    _check_fits(folder, model, metadata, scalars, keys)
    extra = read_extra(folder / EXTRA) if extra_tensors else None
    own_keys = {key for group in groups for key in group.shapes}
    to_copy = find_to_copy(extra, own_keys, reads=check_hashes)
    groups += copy_groups(to_copy, get_known_digests(extra) if check_hashes else None)
    small_files = [
        file for file in config_folder.iterdir() if file.is_file() and describes_model(file)
    ]
    size = sum(group.num_bytes for group in groups)
    check_room(out, size + sum(file.stat().st_size for file in small_files))
    if check_hashes and manifest.is_ours(folder):
        names = [file.name for file in small_files] if config_folder == folder else []
        _check_files_read(folder, names)
    with make_folder_atomically(out) as new_folder:
        for file in small_files:
            shutil.copy2(file, new_folder)
        save_configs(model, new_folder, get_first_dtype(groups))
        for file in new_folder.iterdir():
            with file.open("rb") as copied:
                os.fsync(copied.fileno())
        what = f"converting into {target}"
        write_checkpoint(new_folder, split_files(groups, max_bytes), what=what)
    return size


def _check_files_read(folder: Path, other_names: list[str]) -> None:
    """Compare a checkpoint's weights and files `other_names` with the hashes in its manifest.

    Files with optimizer state, the larger part of a checkpoint, are not read.
    """
    weights = f"{_ACCELERATE_TENSORS if (folder / _ACCELERATE_TENSORS).is_dir() else TENSORS}/"
    files = {
        name: entry
        for name, entry in manifest.read(folder)["files"].items()
        if name.startswith(weights) or name in other_names
    }
    size = sum(entry["size"] for entry in files.values())
    with make_progress_bar(size, f"checking {folder}", True) as progress:
        for name, entry in files.items():
            actual = compute_sha256(folder / name, progress.update)
            if actual != entry["sha256"]:
                raise ValueError(
                    f"{folder / name} has changed since it was written: sha256 {actual}, "
                    f"{manifest.MANIFEST} says {entry['sha256']}; convert an older checkpoint"
                )


def check_room(out: Path, needed: int) -> None:
    """Raise ValueError if the disk of the folder `out` has less than `needed` bytes free."""
    existing = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        old = list_leftovers(out)
        raise ValueError(
            f"{out} needs {needed:,} bytes, but {existing} has room for {free:,}; delete files, or "
            f"name another disk" + (f"; {old} is left from a killed run; delete it" if old else "")
        )


def list_leftovers(out: Path) -> str:
    """List the folders that killed runs left next to `out`, as text; "" if there are none."""
    names = os.listdir(out.parent) if out.parent.is_dir() else []
    leftovers = [name for name in names if name.startswith(get_partial_folder_prefix(out))]
    return ", ".join(os.fspath(out.parent / name) for name in sorted(leftovers))


def _open_checkpoint(folder: Path) -> tuple[Any, Metadata]:
    """Return a reader of torch.distributed.checkpoint, and the checkpoint's metadata."""
    if (folder / _ACCELERATE_TENSORS).is_dir():
        reader: Any = MetadataReader(folder / _ACCELERATE_TENSORS)
    elif (folder / TENSORS).is_dir():
        reader = HuggingFaceStorageReader(os.fspath(folder / TENSORS))
    else:
        raise ValueError(
            f"{folder} is not a training checkpoint: it has neither {_ACCELERATE_TENSORS} "
            f"(Trainer, Accelerate, with fsdp_state_dict_type SHARDED_STATE_DICT) nor {TENSORS} "
            f"(save_checkpoint)"
        )
    metadata: Metadata = reader.read_metadata()
    # Each load of a tensor calls `read_metadata`. Reading thousands of headers each time would take
    # longer than reading the data.
    reader.read_metadata = lambda *_, **__: metadata
    return reader, metadata


def _find_key(name: str, metadata: Metadata) -> str | None:
    """Return the key of a tensor in the checkpoint; Accelerate adds one more "model." prefix."""
    keys = (f"{_PREFIX}{name}", f"{_PREFIX}{_PREFIX}{name}", name)
    return next((key for key in keys if key in metadata.state_dict_metadata), None)


def _find_keys(model: nn.Module, metadata: Metadata) -> dict[str, str]:
    """Map the name of each tensor of a model to its key in the checkpoint.

    The key of a tied parameter may be another of its names: a training checkpoint has its first
    name, and the hub's layout the name that transformers saves (DiffusionGemma: the decoder's).
    """
    key_of: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = _find_key(get_canonical_name(name), metadata)
        if key is not None:
            key_of.setdefault(id(tensor), key)
    named = list_distinct_tensors(model).items()
    return {name: key_of[id(tensor)] for name, tensor in named if id(tensor) in key_of}


def _check_fits(
    folder: Path,
    model: nn.Module,
    metadata: Metadata,
    scalars: Mapping[str, Tensor],
    keys: Mapping[str, str],
) -> None:
    missing, misshapen = [], []
    for name, tensor in list_distinct_tensors(model).items():
        if name in scalars and not tensor.ndim:
            continue
        if name not in keys:
            missing.append(name)
            continue
        saved = metadata.state_dict_metadata[keys[name]]
        assert isinstance(saved, TensorStorageMetadata)
        if saved.size != tensor.shape:
            misshapen.append(f"{name} {tuple(saved.size)} instead of {tuple(tensor.shape)}")
    if any("lora_" in key for key in metadata.state_dict_metadata):
        raise ValueError(
            f"{folder} holds adapters; load it into the model, call save_pretrained, which writes "
            f"the adapter, and merge the adapter: hf-moe-ep merge-adapter BASE ADAPTER OUT"
        )
    if (folder / BASE).exists():
        raise ValueError(
            f"{folder} holds no experts, because its run held them quantised; load it into a model "
            f"that is patched as in that run, or take the experts from the run's base checkpoint"
        )
    known = {get_canonical_name(name) for name in model.state_dict(keep_vars=True)} | scalars.keys()
    used = {_find_key(name, metadata) for name in known}
    unexpected = [
        key.removeprefix(_PREFIX)
        for key in metadata.state_dict_metadata
        if key.startswith(_PREFIX) and key not in used
    ]
    problems = [
        list_names("missing", missing),
        list_names("misshapen", misshapen),
        list_names("unexpected", unexpected),
    ]
    if any(problems):
        raise ValueError(
            f"{folder} does not fit {type(model).__name__}: {'; '.join(filter(None, problems))}"
        )


def _read_slabs(
    reader: Any,
    metadata: Metadata,
    scalars: Mapping[str, Tensor],
    keys: Mapping[str, str],
    name: str,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield a tensor as one slab. `save_checkpoint` stores 0-dim tensors (`scalars`) as JSON."""
    if name in scalars:
        yield from iterate_whole_tensor(scalars[name])
        return
    key = keys[name]
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
    load({key: tensor}, storage_reader=reader, planner=ValuesPlanner(), no_dist=True)
    yield from iterate_whole_tensor(tensor)


def describes_model(file: Path) -> bool:
    """Return True for a file that holds neither weights nor the state of a training run."""
    of_run = (STATE, BASE, EXTRA, CONVERSIONS, "trainer_state.json")
    names = (manifest.MANIFEST, manifest.STARTED, *of_run)
    belongs_to_run = file.name in names or file.name.startswith(
        ("random-", "rng_state", "adapter_")
    )
    is_index = ".safetensors.index." in file.name
    return (
        file.suffix not in (*_WEIGHT_SUFFIXES, *_PICKLE_SUFFIXES)
        and not belongs_to_run
        and not is_index
    )
