"""Load a checkpoint of `save_checkpoint` into a model of any layout.

find        the newest complete folder; every file is compared with its hash
compare     names, shapes, dtypes, optimizer (`same_run.py`), before anything is changed
read        each rank reads its shards: parameters into the model, moments into new tensors
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
    """Load a checkpoint into model, optimizer and scheduler; every rank calls this.

    Parameters, moments and `step` are restored bit by bit at any layout. Random generators are
    restored if the number of data ranks is the same; otherwise they are seeded again, with a
    warning.

    Args:
        directory: a checkpoint, or a folder of checkpoints, of which the newest complete one is
            loaded.
        model: the same architecture and adapters; patched, sharded or not.
        optimizer: has the same parameters in its groups; its state and options are replaced. None
            ignores the saved optimizer.
        scheduler: its state is replaced; None ignores the saved scheduler.
        verify: compare every file with its hash first; False compares sizes alone.

    Returns:
        The saved `progress`, {} if it was None.

    Raises:
        ValueError: on every rank, before anything is changed: there is no complete checkpoint, a
            file is damaged, or the model, the quantised base or the optimizer is another one. The
            file or the tensors are named.
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

    # The optimizer too: its new state is in hub order and moves back with the experts.
    with experts_in_hub_order(model, optimizer):
        saved, targets = together(f"reading {path}", compare)
        together(f"reading {path}", lambda: folder.read_tensors(path, targets, saved))
        together(f"reading {path}", put)
    return saved.progress


def _targets(model: nn.Module, optimizer: Any, saved: StateFile) -> dict[str, Tensor]:
    """Choose the tensors to read into: the model's own memory if it has the form of the files."""
    targets: dict[str, Tensor] = {}
    for name, one in model_slots(model).items():
        if one.tensor.ndim:
            converted = one.to_file is not None
            targets[f"model.{name}"] = one.in_file_form(one.tensor) if converted else one.tensor
    if optimizer is None or saved.optimizer is None:
        return targets
    _, trained = parameter_names(model, optimizer)
    for parameter, values in saved.optimizer.values.items():
        of_parameter = saved.tensors.get(f"model.{parameter}")
        for value in values.values():
            if value.in_file is not None:
                targets[value.in_file] = new_moment(
                    trained[parameter],
                    saved.tensors[value.in_file].dtype,
                    None if of_parameter is None else of_parameter.dtype,
                )
    return targets


@torch.no_grad()
def _put_model(model: nn.Module, targets: dict[str, Tensor], saved: StateFile) -> None:
    for name, one in model_slots(model).items():
        if not one.tensor.ndim:
            one.tensor.copy_(saved.scalars[name])
        elif one.from_file is not None:
            one.tensor.copy_(one.in_model_form(targets[f"model.{name}"]))


def _put_random(path: Path, saved: dict[str, Any], state: ModelState) -> None:
    """Restore this data rank's random generators, or seed them if the number of ranks changed."""
    now, rank = folder.layout_of(state), this_rank()
    before = saved["world_size"] // saved["sp_size"]
    here = now["world_size"] // now["sp_size"]
    data_rank = rank // now["sp_size"]
    first = _read_random(path, 0)
    if before == here and first["device"] == state.device.type:
        sp_rank = rank % now["sp_size"] % saved["sp_size"]
        mine = _read_random(path, data_rank * saved["sp_size"] + sp_rank)
        random_state.restore(mine, state.device)
        return
    random_state.reseed(first, data_rank)
    if is_first():
        warnings.warn(
            f"{path} was saved by {before} data ranks on {first['device']}, this run has {here} on "
            f"{state.device.type}: random generators are seeded anew, dropout and shuffling will "
            f"differ",
            stacklevel=2,
        )


def _read_random(path: Path, rank: int) -> dict[str, Any]:
    text = (path / folder.random_file(rank)).read_text(encoding="utf-8")
    return dict(decode(json.loads(text)))
