"""Load a checkpoint of `save_checkpoint` into a model of any layout.

`load_checkpoint` has four steps:

    step        what happens
    find        the newest complete folder is found, and every file is compared with its hash
    compare     names, shapes, dtypes and optimizer are compared with the run's (`same_run.py`)
    read        each rank reads its shards: parameters into the model, and moments (the optimizer's
                state of a parameter's shape) into new tensors
    restore     0-dim tensors, optimizer, scheduler and random generators are restored

The model does not change before the third step.
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
from hf_moe_ep.checkpoints.training.extra import EXTRA, restore_extra
from hf_moe_ep.checkpoints.training.same_run import check_model, check_optimizer
from hf_moe_ep.checkpoints.training.state_file import StateFile
from hf_moe_ep.checkpoints.training.tensors import (
    allocate_moment,
    fill_model,
    list_model_targets,
    list_parameter_names,
    list_state_tensors,
    refuse_torch_muon,
    restore_optimizer,
)
from hf_moe_ep.etp import list_stock_parts
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import (
    check_alike,
    check_everyone_calls,
    is_first,
    run_on_all,
    run_on_first,
    this_rank,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, get_computing_device, patched_state


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
    restored if the number of data ranks (`data_parallel_size`) is the same; otherwise they are
    seeded again, with a warning.

    Args:
        directory: a checkpoint, or a folder of checkpoints, whose newest complete checkpoint is
            loaded.
        model: has the saved architecture and adapters; patched, sharded or not.
        optimizer: has the saved parameters in its groups. Its state and options are replaced. If it
            is None, the saved optimizer is ignored.
        scheduler: its state is replaced. If it is None, the saved scheduler is ignored.
        verify: compare every file with its hash first; False compares only sizes.

    Returns:
        The saved `progress`, {} if it was None.

    Raises:
        ValueError: on every rank, before anything is changed: there is no complete checkpoint,
            ranks see different checkpoints, a file is damaged, or the model, its quantised base,
            the tensors that its class ignores or the optimizer differs from the saved one. The
            error names the file or the tensors.
        RuntimeError: on every rank: a rank could not read.
    """
    if directory is None:
        raise ValueError(
            "load_checkpoint was given no folder, but None, which newest_checkpoint returns in the "
            "first run; load only if there is a checkpoint: if newest is not None: ..."
        )
    check_everyone_calls("load_checkpoint")
    state = patched_state(model)
    check_alike("load_checkpoint", verify=verify)
    if state.saver is not None:
        state.saver.wait()
    reshard(model)
    path = run_on_first(
        f"looking for a checkpoint in {directory}", lambda: manifest.find_newest_complete(directory)
    )
    if verify:
        manifest.check(path)
    else:
        manifest.check_is_one_checkpoint(path)
    check_base(path, model)
    run_on_first(f"reading {path}", lambda: restore_extra(state, path / EXTRA))

    def compare() -> tuple[StateFile, tuple[dict[str, Tensor], dict[str, int]]]:
        saved = folder.read_state(path)
        if is_first():
            folder.check_only_ours(path)
        check_model(model, saved, str(path))
        if optimizer is not None:
            refuse_torch_muon(optimizer)
            check_optimizer(model, optimizer, saved.optimizer, str(path))
        if scheduler is not None and saved.scheduler is None:
            raise ValueError(f"{path} was saved without a scheduler; call with scheduler=None")
        return saved, _choose_targets(model, optimizer, saved)

    def restore() -> None:
        fill_model(list_state_tensors(model), targets, saved.scalars)
        if optimizer is not None and saved.optimizer is not None:
            restore_optimizer(model, optimizer, saved.optimizer, targets)
        if scheduler is not None:
            scheduler.load_state_dict(saved.scheduler)
        _restore_random(path, saved.layout, state, get_computing_device(model))

    # The files are in hub order: row e of a stacked tensor is expert e. At the end of the block,
    # experts that `balance_experts` had moved are moved again, with their new optimizer state.
    with experts_in_hub_order(model, optimizer):
        saved, (targets, split_dims) = run_on_all(f"reading {path}", compare)
        parts = {
            name: list_stock_parts(tensor, split_dims.get(name)) for name, tensor in targets.items()
        }
        run_on_all(f"reading {path}", lambda: folder.read_tensors(path, parts, saved))
        run_on_all(f"reading {path}", restore)
    return saved.progress


def _choose_targets(
    model: nn.Module, optimizer: Any, saved: StateFile
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors to read into, by their names in the files, and their split dims.

    They are the result of `list_model_targets`, and new tensors for the optimizer's state.
    """
    targets, split_dims = list_model_targets(list_state_tensors(model))
    if optimizer is None or saved.optimizer is None:
        return targets, split_dims
    _, trained = list_parameter_names(model, optimizer)
    for parameter, values in saved.optimizer.values.items():
        if parameter not in trained:
            continue  # another pipeline stage has this parameter
        saved_parameter = saved.tensors.get(f"model.{parameter}")
        for value in values.values():
            if value.tensor_name is not None:
                if (dim := trained[parameter].split_dim) is not None:
                    split_dims[value.tensor_name] = dim
                targets[value.tensor_name] = allocate_moment(
                    trained[parameter],
                    saved.tensors[value.tensor_name].dtype,
                    None if saved_parameter is None else saved_parameter.dtype,
                )
    return targets, split_dims


def _restore_random(
    path: Path, saved_layout: dict[str, Any], state: ModelState, device: torch.device
) -> None:
    """Restore this rank's random generators, or seed them if the number of data ranks changed."""
    layout, rank = folder.describe_layout(state), this_rank()
    num_saved, num_now = map(random_state.count_data_ranks, (saved_layout, layout))
    data_rank = random_state.compute_data_rank(layout, rank)
    rank_0_state = _read_random(path, 0)
    if num_saved == num_now and rank_0_state["device"] == device.type:
        saved_rank = random_state.find_saved_rank(saved_layout, layout, rank)
        rank_state = _read_random(path, saved_rank)
        random_state.restore(rank_state, device)
        return
    random_state.reseed(rank_0_state, data_rank)
    if is_first():
        warnings.warn(
            f"{path} was saved by {num_saved} data ranks on {rank_0_state['device']}, this run has "
            f"{num_now} on {device.type}: random generators are seeded anew, so dropout and "
            f"shuffling will differ",
            stacklevel=2,
        )


def _read_random(path: Path, rank: int) -> dict[str, Any]:
    text = (path / folder.make_random_file_name(rank)).read_text(encoding="utf-8")
    return dict(decode(json.loads(text)))
