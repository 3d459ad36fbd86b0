"""Save the complete state of a training run, at any layout.

`save_checkpoint` has four steps:

    step        what happens
    check       an error names ranks that do not call `save_checkpoint` or pass other arguments
    prepare     each rank names its tensors (`tensors.py`) and encodes the rest as JSON; if a rank
                fails in this step, or if ranks differ, nothing is written
    clear       rank 0 makes an empty folder, marked as unfinished (`folder.py`)
    write       each rank writes its shards (`spread.py`); `manifest.write` then writes the file
                that makes the checkpoint complete (`storage/manifest.py`)

An error on one rank is raised on every rank. With `asynchronous=True` the training step does not
wait for `write`, because `prepare` copies the state to host memory. The background threads use
their own process group, because the collectives of two threads in one group would mix
(`ranks/background.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.json_values import encode
from hf_moe_ep.checkpoints.storage.part_files import Shards
from hf_moe_ep.checkpoints.training import folder
from hf_moe_ep.checkpoints.training import rng as random_state
from hf_moe_ep.checkpoints.training.base import BASE, describe_base
from hf_moe_ep.checkpoints.training.conversions import CONVERSIONS, make_conversions
from hf_moe_ep.checkpoints.training.extra import EXTRA, describe_extra
from hf_moe_ep.checkpoints.training.stages import join_stages
from hf_moe_ep.checkpoints.training.state_file import StateFile, compute_digest
from hf_moe_ep.checkpoints.training.tensors import collect
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import (
    check_alike,
    check_everyone_calls,
    find_differing,
    is_first,
    run_on_all,
    run_on_first,
    this_rank,
)
from hf_moe_ep.ranks.background import SaveHandle, Saver
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, get_computing_device, patched_state

# The approximate size of a file. One rank verifies a file, so with larger files some ranks would
# have to read much more than others.
_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class _Snapshot:
    """The part of a checkpoint that one rank writes.

    Attributes:
        files: the shards that the rank writes, by file.
        values: the content of the rank's JSON files by name; None stands for a file that is not
            written.
        layout: the layout of all ranks, for the manifest.
    """

    files: list[Shards]
    values: dict[str, Any]
    layout: dict[str, Any]


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    progress: dict[str, Any] | None = None,
    asynchronous: bool = False,
) -> SaveHandle:
    """Write a checkpoint that `load_checkpoint` reads at any layout; every rank calls this.

    For a model with PEFT adapters, all adapters (active or not), other trainable parameters and all
    persistent buffers are saved, but not the frozen base. For experts that are held quantised,
    hashes are saved; `load_checkpoint` compares the hashes with the base of the model. If the model
    was loaded with tensors that its class ignores, the new checkpoint stores their positions in the
    loaded files, and their hashes, but no copy.

    Args:
        directory: a folder for this checkpoint only (`out/step-100`), shared by all ranks. If it
            holds the files of an unfinished save, they are removed.
        model: patched; sharded, or not sharded in a single process.
        optimizer: the optimizer of the model's current parameters. Its state must consist of
            tensors of the parameter's shape and of single numbers. If it is None, only the model is
            saved.
        scheduler: an object with `state_dict()`, or None.
        progress: the position of the training (step, epoch, position in the data), as a dict of
            numbers, strings, lists, tuples, dicts and small tensors. Rank 0's dict is saved.
        asynchronous: return when the state is copied to host memory, and write in the background.
            The background threads wait for each other up to the process group's timeout. The next
            save waits for this one and raises its error. Call `wait()` on the handle before the
            process ends.

    Returns:
        A handle; its `wait()` returns immediately if `asynchronous` is False.

    Raises:
        ValueError: on every rank: `directory` holds a complete checkpoint or other files, the model
            is not patched, or a value cannot be saved.
        RuntimeError: a rank failed. Every rank raises the error, which names that rank and the
            reason; earlier checkpoints are unchanged and training can continue.
    """
    check_everyone_calls("save_checkpoint")
    state = patched_state(model)
    path = Path(directory).absolute()  # os.chdir must not redirect the background thread
    check_alike("save_checkpoint", directory=os.fspath(directory), asynchronous=asynchronous)
    saver = state.saver = state.saver or Saver()
    saver.wait()
    reshard(model)

    def prepare() -> tuple[list[Shards], StateFile, dict[str, Any]]:
        values: dict[str, Any] = {}
        if is_first():
            folder.check_free(path)
            values = {
                BASE: base,
                EXTRA: describe_extra(state),
                CONVERSIONS: make_conversions(model),
            }
        files, own = _collect_state(model, optimizer, scheduler, progress, state)
        random = random_state.capture(get_computing_device(model))
        values[folder.make_random_file_name(this_rank())] = encode(random, "random state")
        if asynchronous:
            files = [
                {name: (box, x.to("cpu", copy=True)) for name, (box, x) in shards.items()}
                for shards in files
            ]
        return files, own, values

    base = describe_base(model)
    with experts_in_hub_order(model, optimizer):
        files, own, values = run_on_all("save_checkpoint", prepare)
        joined = run_on_all("save_checkpoint", lambda: join_stages(own, state))
        content = run_on_all("save_checkpoint", joined.to_json)
        _check_equal(compute_digest(content))
        if is_first():
            values[folder.STATE] = content
        snapshot = _Snapshot(files, values, own.layout)
        run_on_first(f"clearing {path}", lambda: folder.clear(path, model))
        if not asynchronous:
            _write(path, snapshot, None)
    if asynchronous:
        return saver.start(path, partial(_write, path, snapshot), get_computing_device(model))
    return SaveHandle(path)


def _collect_state(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    progress: dict[str, Any] | None,
    state: ModelState,
) -> tuple[list[Shards], StateFile]:
    """Return the shards that this rank writes, by file, and the state of its pipeline stage."""
    if not isinstance(progress, dict | None):
        raise ValueError(f"progress is {progress!r}; make it a dict, like {{'step': 100}}")
    named = collect(model, optimizer)
    saved_tensors = named.describe_tensors()
    own = StateFile(
        layout=folder.describe_layout(state),
        progress=progress or {},
        scheduler=None if scheduler is None else scheduler.state_dict(),
        tensors=saved_tensors,
        scalars=named.scalars,
        optimizer=named.optimizer,
    )
    return named.list_own_files(saved_tensors, _FILE_BYTES), own


def _check_equal(state_digest: str) -> None:
    digests = find_differing(state_digest) or [state_digest]
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            f"ranks {others} have other tensors or another optimizer state than rank 0: every rank "
            f"must take the same steps with the same options"
        )


def _write(path: Path, snapshot: _Snapshot, group: dist.ProcessGroup | None) -> None:
    def write_tensors() -> dict[str, Any]:
        return folder.write_tensors(path, snapshot.files)

    def write_other_files() -> None:
        for name, value in snapshot.values.items():
            if value is not None:
                folder.write_json(path / name, value)

    written = run_on_all(f"saving {path}", write_tensors, group)
    run_on_all(f"saving {path}", write_other_files, group)
    manifest.write(path, snapshot.layout, written=written, group=group)
