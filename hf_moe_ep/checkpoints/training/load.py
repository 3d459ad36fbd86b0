"""Put a checkpoint of `save_checkpoint` into a model of whatever layout.

find        the newest complete folder; every file is read against its hash
compare     names, shapes, dtypes, optimizer (`same_run.py`), before anything is changed
read        each rank its part of each tensor: parameters into place, moments beside them
put         buffers, optimizer, scheduler, random generators
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.json_values import decode
from hf_moe_ep.checkpoints.training import folder
from hf_moe_ep.checkpoints.training import rng as random_state
from hf_moe_ep.checkpoints.training.base import check_base
from hf_moe_ep.checkpoints.training.same_run import check_model, check_optimizer
from hf_moe_ep.checkpoints.training.state_file import StateFile
from hf_moe_ep.checkpoints.training.tensors import (
    model_slots,
    new_moment,
    parameter_names,
    put_optimizer,
)
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.together import (
    check_alike,
    check_everyone_calls,
    is_first,
    on_first,
    this_rank,
    together,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, patched_state


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    verify: bool = True,
) -> dict[str, Any]:
    """Put the state of a checkpoint into model, optimizer and scheduler; every rank calls this.

    Parameters, moments and `step` come back bit by bit at any layout. Random generators too, where
    as many ranks as before have data of their own; else they are seeded anew, with a warning.

    Args:
        directory: a checkpoint, or a folder of several: then the newest complete one.
        model: the same architecture and adapters, patched, sharded or not.
        optimizer: with the same parameters in its groups; state and options are replaced. None
            ignores what was saved of one.
        scheduler: its state is replaced; None ignores what was saved of one.
        verify: read every file against its hash first; else sizes alone.

    Returns:
        The `progress` that was saved, {} for None.

    Raises:
        ValueError: on every rank, before anything was changed: no complete checkpoint, a damaged
            file, another model, quantised base or optimizer; it names the file or the tensors.
        RuntimeError: on every rank: a rank could not read.
    """
    check_everyone_calls("load_checkpoint")
    state = patched_state(model)
    check_alike("load_checkpoint", verify=verify)
    if state.saver is not None:
        state.saver.wait()
    reshard(model)
    path = on_first(
        f"looking for a checkpoint in {directory}", lambda: manifest.newest_complete(directory)
    )
    if verify:
        manifest.check(path)
    check_base(path, model)

    def compare() -> tuple[StateFile, dict[str, Tensor]]:
        saved = folder.read_state(path)
        if is_first():
            folder.check_only_ours(path)
        check_model(model, saved, str(path))
        if optimizer is not None:
            check_optimizer(model, optimizer, saved.optimizer, str(path))
        if scheduler is not None and saved.scheduler is None:
            raise ValueError(f"{path} was saved without a scheduler; call without one")
        return saved, _targets(model, optimizer, saved)

    def put() -> None:
        _put_model(model, targets, saved)
        if optimizer is not None and saved.optimizer is not None:
            put_optimizer(model, optimizer, saved.optimizer, targets)
        if scheduler is not None:
            scheduler.load_state_dict(saved.scheduler)
        _put_random(path, saved.layout, state)

    # What is read of an optimizer takes the place of what it keeps, and moves with the experts.
    with experts_in_hub_order(model, optimizer):
        saved, targets = together(f"reading {path}", compare)
        together(f"reading {path}", lambda: folder.read_tensors(path, targets, saved))
        together(f"reading {path}", put)
    return saved.progress


def _targets(model: nn.Module, optimizer: Any, saved: StateFile) -> dict[str, Tensor]:
    """Choose where each tensor is read to: the model's own storage where it has the file's form."""
    targets: dict[str, Tensor] = {}
    for name, slot in model_slots(model).items():
        if slot.tensor.ndim:
            converted = slot.to_file is not None
            targets[f"model.{name}"] = slot.saved(slot.tensor) if converted else slot.tensor
    if optimizer is None or saved.optimizer is None:
        return targets
    _, slots = parameter_names(model, optimizer)
    for parameter, values in saved.optimizer.kept.items():
        of_parameter = saved.tensors.get(f"model.{parameter}")
        for kept in values.values():
            if kept.in_file is not None:
                targets[kept.in_file] = new_moment(
                    slots[parameter],
                    saved.tensors[kept.in_file].dtype,
                    None if of_parameter is None else of_parameter.dtype,
                )
    return targets


@torch.no_grad()
def _put_model(model: nn.Module, targets: dict[str, Tensor], saved: StateFile) -> None:
    for name, slot in model_slots(model).items():
        if not slot.tensor.ndim:
            slot.tensor.copy_(saved.scalars[name])
        elif slot.from_file is not None:
            slot.tensor.copy_(slot.fit(targets[f"model.{name}"]))


def _put_random(path: Path, saved: dict[str, Any], state: ModelState) -> None:
    """Put this data rank's generators back, or seed them anew where there is no such rank."""
    now, rank = folder.layout_of(state), this_rank()
    before = saved["world_size"] // saved["sp_size"]
    here = now["world_size"] // now["sp_size"]
    data_rank = rank // now["sp_size"]
    first = _read_random(path, 0)
    if before == here and first["device"] == state.device.type:
        place = rank % now["sp_size"] % saved["sp_size"]
        mine = _read_random(path, data_rank * saved["sp_size"] + place)
        random_state.restore(mine, state.device)
        return
    random_state.reseed(first, data_rank)
    if is_first():
        warnings.warn(
            f"{path} was saved by {before} data ranks on {first['device']}, here are {here} on "
            f"{state.device.type}: random generators are seeded anew, dropout and shuffling will "
            f"differ",
            stacklevel=2,
        )


def _read_random(path: Path, rank: int) -> dict[str, Any]:
    text = (path / folder.random_file(rank)).read_text(encoding="utf-8")
    return dict(decode(json.loads(text)))
