"""Save the trained tensors that PEFT does not save, in a checkpoint of the Trainer.

The Trainer saves a model with adapters as PEFT does: the active adapter, without the base model. If
the user also trains a router or a norm of the base, or a second adapter, the Trainer saves the
moments of these tensors but not their values. This module saves the values in a folder of the
checkpoint, in the format of `save_checkpoint`:

    beside_adapters/tensors.json    names, shapes, shardings, 0-dim tensors (`state_file.py`)
    beside_adapters/shard-*         the shards of each rank (`part_files.py`)

If there are no such tensors, nothing is written. Before a load, `check_tensors_without_peft`
compares the saved tensors with the tensors of the model. `read_tensors_without_peft` reads them at
any layout of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import nn

from hf_moe_ep.checkpoints.storage.part_files import Shards, write_parts
from hf_moe_ep.checkpoints.training import state_file
from hf_moe_ep.checkpoints.training.folder import describe_layout, read_shards, write_json
from hf_moe_ep.checkpoints.training.same_run import check_model, format_names
from hf_moe_ep.checkpoints.training.stages import join_stages
from hf_moe_ep.checkpoints.training.state_file import StateFile
from hf_moe_ep.checkpoints.training.tensors import (
    collect,
    fill_model,
    find_trained_names,
    list_model_targets,
    list_state_tensors,
)
from hf_moe_ep.etp import list_stock_parts
from hf_moe_ep.ranks.all_ranks import (
    gather,
    is_first,
    run_on_all,
    run_on_first,
    this_rank,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import patched_state

WITHOUT_PEFT_FOLDER = "beside_adapters"
_TENSORS = "tensors.json"
_FILE_BYTES = 1 << 30


def write_tensors_without_peft(
    model: nn.Module, folder: Path, saved_elsewhere: Collection[str]
) -> None:
    """Save the tensors of `list_state_tensors` except `saved_elsewhere`; every rank calls this.

    Experts must be in hub order.

    Args:
        saved_elsewhere: the names of tensors of this rank's stage that another file contains.
    """
    state = patched_state(model)
    reshard(model)
    path = folder / WITHOUT_PEFT_FOLDER
    what = f"saving {path}"

    def select() -> tuple[StateFile, list[Shards]]:
        named = collect(model, None)
        missing = {name for name in list_state_tensors(model) if name not in saved_elsewhere}
        # The keys of `tensors` begin with "model.", the keys of `scalars` do not (`collect`).
        selected = replace(
            named,
            tensors={n: x for n, x in named.tensors.items() if n.removeprefix("model.") in missing},
            scalars={n: x for n, x in named.scalars.items() if n in missing},
        )
        saved_tensors = selected.describe_tensors()
        content = StateFile(describe_layout(state), tensors=saved_tensors, scalars=selected.scalars)
        return content, selected.list_own_files(saved_tensors, _FILE_BYTES)

    own, files = run_on_all(what, select)
    content = join_stages(own, state)
    if not content.tensors and not content.scalars:
        return
    run_on_first(what, lambda: path.mkdir(parents=True, exist_ok=True))
    run_on_all(what, lambda: write_parts(path, this_rank(), files))
    run_on_first(what, lambda: write_json(path / _TENSORS, content.to_json()))


def check_tensors_without_peft(
    model: nn.Module, folder: Path, saved_elsewhere: Collection[str], *, strict: bool = True
) -> StateFile:
    """Check that a checkpoint has the tensors that PEFT does not save; every rank calls this.

    Checkpoints of stock code and of older versions have no such tensors. If no missing tensor is
    trained (buffers, a frozen adapter of a reference), or if `strict` is False, the model keeps its
    values, with a warning.

    Args:
        saved_elsewhere: as in `write_tensors_without_peft`.

    Returns:
        The description of the saved tensors, for `read_tensors_without_peft`.

    Raises:
        ValueError: on every rank: the checkpoint lacks a parameter that is trained, or has a tensor
            that does not fit this model.
    """
    path = folder / WITHOUT_PEFT_FOLDER

    def compare() -> tuple[StateFile, list[str]]:
        file = path / _TENSORS
        saved = state_file.read(file) if file.is_file() else StateFile(layout={})
        check_model(model, saved, str(path), allow_missing=True)
        needed = list_state_tensors(model).keys() - set(saved_elsewhere)
        lacking = sorted(needed - _list_names_in_model(saved))
        trained = find_trained_names(model)
        if strict and (parameters := [name for name in lacking if name in trained]):
            raise ValueError(
                f"{folder} has the active adapter, but lacks {format_names(parameters)}, which "
                f"this run trains as well; resume from a checkpoint of a run that trained the same "
                f"parameters and was saved by this version of hf_moe_ep"
            )
        return saved, lacking

    saved, lacking = run_on_all(f"reading {path}", compare)
    missing = sorted({name for names in gather(lacking) for name in names})
    if missing and is_first():
        warnings.warn(
            f"{folder} lacks {format_names(missing)}, as checkpoints of stock code and of older "
            f"versions do; these tensors keep the values that they have in the model",
            stacklevel=2,
        )
    return saved


def read_tensors_without_peft(model: nn.Module, folder: Path, saved: StateFile) -> None:
    """Read the saved tensors into a model; every rank calls this.

    Experts must be in hub order.

    Args:
        saved: the result of `check_tensors_without_peft`.

    Raises:
        ValueError: on every rank: a file is damaged.
    """
    path, names_in_model = folder / WITHOUT_PEFT_FOLDER, _list_names_in_model(saved)
    reshard(model)

    def read() -> None:
        state_tensors = list_state_tensors(model)
        entries = {name: state_tensors[name] for name in state_tensors if name in names_in_model}
        targets, split_dims = list_model_targets(entries)
        parts = {
            name: list_stock_parts(tensor, split_dims.get(name)) for name, tensor in targets.items()
        }
        file_names = [file.name for file in path.glob("shard-*.safetensors")]
        read_shards(path, file_names, parts, saved)
        fill_model(entries, targets, saved.scalars)

    run_on_all(f"reading {path}", read)


def _list_names_in_model(saved: StateFile) -> set[str]:
    """Return the names, without the prefix "model.", of all tensors in a state file."""
    return {name.removeprefix("model.") for name in saved.tensors} | saved.scalars.keys()
