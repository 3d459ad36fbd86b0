"""What lies in the folder of a training checkpoint, and how each kind of file is written and read.

    manifest.json            last: what is there, sizes, hashes (`manifest.py`)
    hf_moe_ep.json           first: this folder is ours
    tensors/shard-*          parameters, buffers, moments (`tensors.py`): safetensors, each rank its
                             own part, as torch.distributed.checkpoint reads them (`part_files.py`)
    state.json               everything else (`state_file.py`)
    quantised_base.json      hashes of experts that are held quantised (`base.py`)
    random-00003.json        the random generators of rank 3
    config.json, ..          of the model, for `hf-moe-ep convert`

No file is a pickle. Nothing is renamed but the manifest: a folder without one is not there, and
an older checkpoint stays the newest.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.configs import BESIDE, CONFIGS, save_configs
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.boxes import local_box, local_tensor
from hf_moe_ep.checkpoints.storage.part_files import (
    Part,
    nearest_first,
    of_rank,
    read_parts,
    write_parts,
)
from hf_moe_ep.checkpoints.training import state_file
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.state_file import StateFile
from hf_moe_ep.ranks.background import is_written
from hf_moe_ep.ranks.together import this_rank, world_size
from hf_moe_ep.state import ModelState

TENSORS, STATE = "tensors", "state.json"


def random_file(rank: int) -> str:
    """The name of the file that holds the random generators of a rank."""
    return f"random-{rank:05d}.json"


def layout_of(state: ModelState) -> dict[str, Any]:
    """Say how a model lies, for the manifest and for whoever loads at another layout."""
    config = state.config
    return {
        "world_size": world_size(),
        "ep_size": config.ep_size or 1,
        "sp_size": config.sp_size or 1,
        "dp_replicate_size": config.dp_replicate_size or 1,
        "expert_shard_dim": config.expert_shard_dim,
        "sharded": state.meshes is not None,
    }


def check_free(path: Path) -> None:
    """Raise ValueError where a save to `path` would remove what is no torn checkpoint of ours."""
    if is_written(path):
        raise ValueError(f"another model is being saved to {path}; save each to its own directory")
    if (path / manifest.MANIFEST).exists():
        manifest.check_sizes(path)
        raise ValueError(f"{path} holds a complete checkpoint; save to another directory")
    found = {item.name for item in path.iterdir()} if path.exists() else set()
    # Names like config.json are others' too: without the marker, which comes first, none is ours.
    marked = manifest.STARTED in found
    others = [name for name in found if not (marked and _is_known(name))]
    if others:
        raise ValueError(
            f"{path} holds {', '.join(sorted(others)[:5])}, no part of a checkpoint; save to a "
            f"directory of its own, like {path / 'step-100'}"
        )


def _is_known(name: str) -> bool:
    known = (TENSORS, STATE, BASE, *CONFIGS, manifest.STARTED, manifest.PARTIAL)
    return name in known or name.startswith(BESIDE) or Path(name).match("random-*.json")


def clear(path: Path, model: nn.Module) -> None:
    """Make an empty folder that is marked as ours, with the model's config in it."""
    for item in path.iterdir() if path.exists() else ():
        if item.name == manifest.STARTED:  # stays: a kill here leaves a folder known as ours
            continue
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    manifest.begin(path)
    (path / TENSORS).mkdir()
    save_configs(model, path)


def write_json(path: Path, value: Any) -> None:
    """Write a file of `folder`; the manifest has it on disk later."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def write_tensors(path: Path, parts: list[Part], num_files: int) -> dict[str, Any]:
    """Write this rank's files, every rank for itself; returns what the manifest says of them."""
    written = write_parts(path / TENSORS, this_rank(), parts, num_files)
    return {f"{TENSORS}/{name}": entry for name, entry in written.items()}


def read_tensors(path: Path, targets: dict[str, Tensor], saved: StateFile) -> None:
    """Fill `targets`, each as this rank holds it; every rank for itself."""
    known = manifest.read(path)["files"]
    names = [Path(name).name for name in known if name.startswith(f"{TENSORS}/")]
    ranks = ranks_needed(targets, saved)
    if ranks is not None:
        names = [name for name in names if of_rank(name) in ranks]
    ordered = nearest_first(names, this_rank(), world_size())
    read_parts((path / TENSORS / name for name in ordered), targets)


def ranks_needed(targets: dict[str, Tensor], saved: StateFile) -> set[int] | None:
    """Find the ranks that wrote something of what this one holds; None where nobody noted it."""
    needed: set[int] = set()
    # Layers are alike, and so are an optimizer's moments: asked once for all of them.
    asked: dict[tuple[Any, ...], frozenset[int]] = {}
    for name, target in targets.items():
        form = saved.tensors[name]
        if form.spread is None:
            return None
        if local_tensor(target).numel():
            box = local_box(target)
            key = (id(form.spread), tuple(form.shape), form.replica, box)
            if key not in asked:
                asked[key] = form.spread.holders(form.shape, form.replica, box)
            needed |= asked[key]
    return needed


def check_only_ours(path: Path) -> None:
    """Raise ValueError where a file that nobody named lies beside the tensors: `convert` reads it.

    For one rank: it lists the files of all.
    """
    known = manifest.read(path)["files"]
    for file in sorted((path / TENSORS).iterdir()):
        if f"{TENSORS}/{file.name}" not in known:
            raise ValueError(f"{file} is not in {manifest.MANIFEST}; remove it")


def read_state(path: Path) -> StateFile:
    """Read the state of a complete checkpoint of `save_checkpoint`.

    Raises:
        ValueError: the Trainer or Accelerate wrote it, or it is damaged.
    """
    known = manifest.read(path)["files"]
    if STATE not in known:
        raise ValueError(
            f"{path} was written by the Trainer or by Accelerate, not by save_checkpoint; go on "
            f"from it by trainer.train(resume_from_checkpoint={str(path)!r}), or by "
            f"accelerator.load_state({str(path)!r})"
        )
    return state_file.read(path / STATE)
