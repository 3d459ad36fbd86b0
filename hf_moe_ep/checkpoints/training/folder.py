"""Write and read the files in the folder of a training checkpoint.

    file                     content
    manifest.json            written last: names, sizes and hashes of all files (`manifest.py`)
    hf_moe_ep.json           written first: marks the folder as a checkpoint of this package
    tensors/shard-*          parameters, buffers, moments (`tensors.py`) as safetensors; each rank
                             writes its shards in torch.distributed.checkpoint's format
                             (`part_files.py`)
    state.json               everything else (`state_file.py`)
    extra_tensors.json       positions of tensors that the model's class ignores (`extra.py`)
    conversions.json         the layout of the loaded checkpoint, if it is not the class's own
    quantised_base.json      hashes of experts that are held quantised (`base.py`)
    random-00003.json        the random generators of rank 3
    config.json, ..          the model's config, for `hf-moe-ep convert`, and the Python files of a
                             model that was loaded with trust_remote_code=True

No file is a pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_moe_ep.checkpoints.hub.configs import CONFIGS, TEMPORARY_CONFIGS, save_configs
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import check_is_not_a_file
from hf_moe_ep.checkpoints.storage.part_files import (
    Parts,
    Shards,
    find_writer,
    read_parts,
    write_parts,
)
from hf_moe_ep.checkpoints.training import state_file
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.conversions import CONVERSIONS
from hf_moe_ep.checkpoints.training.extra import EXTRA
from hf_moe_ep.checkpoints.training.state_file import StateFile
from hf_moe_ep.ranks.all_ranks import this_rank, world_size
from hf_moe_ep.ranks.background import is_written
from hf_moe_ep.state import ModelState

TENSORS, STATE = "tensors", "state.json"


def make_random_file_name(rank: int) -> str:
    """Return the name of the file with the random generators of a rank."""
    return f"random-{rank:05d}.json"


def describe_layout(state: ModelState) -> dict[str, Any]:
    """Return the layout of a model as JSON values, for the manifest and for `state.json`."""
    config = state.config
    return {
        "world_size": world_size(),
        "ep_size": config.ep_size or 1,
        "etp_size": config.etp_size or 1,
        "sp_size": config.sp_size or 1,
        "cp_size": config.cp_size or 1,
        "dp_replicate_size": config.dp_replicate_size or 1,
        "pp_size": config.pp_size or 1,
        "expert_shard_dim": config.expert_shard_dim,
        "sharded": state.meshes is not None,
    }


def check_free(path: Path) -> None:
    """Raise ValueError unless `path` is missing, empty, or has only files of an unfinished save."""
    check_is_not_a_file(path)
    if is_written(path):
        raise ValueError(
            f"another model is being saved to {path}; save each model to its own directory"
        )
    if (path / manifest.MANIFEST).exists():
        manifest.check_sizes(path)
        raise ValueError(f"{path} holds a complete checkpoint; save to another directory")
    names = {item.name for item in path.iterdir()} if path.exists() else set()
    # Other programs write files like config.json, too. They are removed only if the marker exists.
    has_marker = manifest.STARTED in names
    others = [name for name in names if not (has_marker and _is_known(name))]
    if others:
        raise ValueError(
            f"{path} holds files that are not part of a checkpoint: "
            f"{', '.join(sorted(others)[:5])}; save to a directory for this checkpoint only, like "
            f"{path / 'step-100'}"
        )


def _is_known(name: str) -> bool:
    """Return True if a save may have written a file of this name."""
    of_run = (TENSORS, STATE, BASE, EXTRA, CONVERSIONS)
    known = (*of_run, *CONFIGS, manifest.STARTED, manifest.PARTIAL)
    # A model that was loaded with trust_remote_code=True has Python files.
    if Path(name).suffix == ".py":
        return True
    return name in known or name.startswith(TEMPORARY_CONFIGS) or Path(name).match("random-*.json")


def clear(path: Path, model: nn.Module) -> None:
    """Remove the files of an unfinished save; write the marker and the model's config."""
    for item in path.iterdir() if path.exists() else ():
        if item.name == manifest.STARTED:  # keeps the folder marked if the process is killed
            continue
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    manifest.begin(path)
    (path / TENSORS).mkdir()
    save_configs(model, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; `manifest.write` syncs it to disk later."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_tensors(path: Path, files: list[Shards]) -> dict[str, Any]:
    """Write this rank's files of tensors; return their entries for the manifest."""
    written = write_parts(path / TENSORS, this_rank(), files)
    return {f"{TENSORS}/{name}": entry for name, entry in written.items()}


def read_tensors(path: Path, targets: Mapping[str, Parts], saved: StateFile) -> None:
    """Read this rank's shards of `targets`."""
    known = manifest.read(path)["files"]
    names = [Path(name).name for name in known if name.startswith(f"{TENSORS}/")]
    read_shards(path / TENSORS, names, targets, saved)


def read_shards(
    path: Path, names: Iterable[str], targets: Mapping[str, Parts], saved: StateFile
) -> None:
    """Read this rank's shards of `targets` from the files `names` of a folder.

    If the checkpoint stores its shardings, the files of ranks that wrote none of these elements are
    not opened.
    """
    ranks = find_ranks_needed(targets, saved)
    needed = [name for name in sorted(names) if ranks is None or find_writer(name) in ranks]
    read_parts((path / name for name in needed), targets)


def find_ranks_needed(targets: Mapping[str, Parts], saved: StateFile) -> set[int] | None:
    """Return the ranks that wrote the shards that this rank needs.

    The result is None for a checkpoint of an older version, which does not store the shardings.
    """
    needed: set[int] = set()
    # Many tensors have the same shape and sharding: layers, and an optimizer's moments.
    known: dict[tuple[Any, ...], frozenset[int]] = {}
    for name, parts in targets.items():
        tensor = saved.tensors[name]
        if tensor.spread is None:
            return None
        for box in (box for box, view in parts if view.numel()):
            key = (id(tensor.spread), tuple(tensor.shape), tensor.replica, box)
            if key not in known:
                known[key] = tensor.spread.holders(tensor.shape, tensor.replica, box)
            needed |= known[key]
    return needed


def check_only_ours(path: Path) -> None:
    """Raise ValueError if the folder of tensors has a file that the manifest does not name.

    `convert` would read such a file. One rank checks the whole folder.
    """
    known = manifest.read(path)["files"]
    for file in sorted((path / TENSORS).iterdir()):
        if f"{TENSORS}/{file.name}" not in known:
            raise ValueError(f"{file} is not in {manifest.MANIFEST}; remove it")


def read_state(path: Path) -> StateFile:
    """Read the state of a complete checkpoint of `save_checkpoint`.

    Raises:
        ValueError: the Trainer or Accelerate wrote the checkpoint, or it is damaged.
    """
    known = manifest.read(path)["files"]
    if STATE not in known:
        raise ValueError(
            f"{path} was written by the Trainer or by Accelerate, not by save_checkpoint; resume "
            f"from it with trainer.train(resume_from_checkpoint={str(path)!r}) or "
            f"accelerator.load_state({str(path)!r})"
        )
    return state_file.read(path / STATE)
