"""Save everything a training run goes on from, at whatever layout it lies.

    meet        ranks that stay away, or call with other arguments, are named
    prepare     each rank names its tensors (`tensors.py`) and makes JSON of the rest; nothing is
                written where one of them cannot, or where they differ
    clear       rank 0 makes an empty folder, marked as unfinished (`folder.py`)
    write       each rank its part, which it knows by itself (`spread.py`), and the manifest last

An error of one rank is an error on every rank. In the background (`asynchronous=True`) the step
waits for `prepare` alone, which then copies to the host. Ranks meet over a group of their own
there, because collectives of two threads on one group would mix (`ranks/background.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.json_values import encode
from hf_moe_ep.checkpoints.storage.part_files import Part
from hf_moe_ep.checkpoints.training import folder
from hf_moe_ep.checkpoints.training import rng as random_state
from hf_moe_ep.checkpoints.training.base import BASE, describe_base
from hf_moe_ep.checkpoints.training.state_file import StateFile, digest
from hf_moe_ep.checkpoints.training.tensors import collect
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.background import SaveHandle, Saver
from hf_moe_ep.ranks.together import (
    check_alike,
    check_everyone_calls,
    differing,
    is_first,
    on_first,
    this_rank,
    together,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, patched_state

# Of one rank; files are what ranks share when they verify a checkpoint.
_FILE_BYTES = 1 << 30


@dataclass
class _Snapshot:
    """One rank's part of a checkpoint; all but the tensors as JSON takes it."""

    parts: list[Part]
    num_files: int
    state: dict[str, Any]
    random: dict[str, Any]
    layout: dict[str, Any]
    base: dict[str, Any] | None = None


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

    Of a model with PEFT's adapters those, active or not, what else trains, and all persistent
    buffers are saved: its frozen base is where it was loaded from. Of experts that are held
    quantised hashes are saved, by which `load_checkpoint` knows their base.

    Args:
        directory: of this checkpoint alone (`out/step-100`), shared by all ranks. What an
            unfinished save left there is removed.
        model: patched, sharded or (in one process) not.
        optimizer: of the model's parameters as they are now, or None: of the model alone. State of
            a parameter's own shape and single numbers fit another layout; anything else is refused.
        scheduler: with `state_dict()`, or None.
        progress: where training stands (step, epoch, position in the data): numbers, strings,
            lists, tuples, dicts and small tensors; rank 0's is kept.
        asynchronous: return when the state is copied to host memory; write in the background, where
            ranks wait for each other no longer than the process group's timeout. A later save waits
            for it, and raises its error. Call `wait()` before the process ends.

    Returns:
        A handle; without `asynchronous` its `wait()` has nothing left to do.

    Raises:
        ValueError: on every rank: `directory` holds a complete checkpoint or other files, the model
            is not patched, or something cannot be saved.
        RuntimeError: on every rank, naming the rank that failed and why; what was there before is
            untouched and training can go on.
    """
    check_everyone_calls("save_checkpoint")
    state = patched_state(model)
    path = Path(directory).absolute()  # the thread outlives an os.chdir
    check_alike("save_checkpoint", directory=os.fspath(directory), asynchronous=asynchronous)
    saver = state.saver = state.saver or Saver()
    saver.wait()
    reshard(model)

    def prepare() -> _Snapshot:
        if is_first():
            folder.check_free(path)
        snapshot = _take(model, optimizer, scheduler, progress, state)
        if asynchronous:
            snapshot.parts = [
                replace(part, values=part.values.to("cpu", copy=True)) for part in snapshot.parts
            ]
        return snapshot

    base = describe_base(model)
    with experts_in_hub_order(model, optimizer):
        snapshot = together("save_checkpoint", prepare)
        snapshot.base = base
        _check_same_everywhere(digest(snapshot.state))
        on_first(f"clearing {path}", lambda: folder.clear(path, model))
        if not asynchronous:
            _write(path, snapshot, None)
    if asynchronous:
        return saver.start(path, partial(_write, path, snapshot), state.device)
    return SaveHandle(path)


def _take(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    progress: dict[str, Any] | None,
    state: ModelState,
) -> _Snapshot:
    if not isinstance(progress, dict | None):
        raise ValueError(f"progress is {progress!r}; make it a dict, like {{'step': 100}}")
    named = collect(model, optimizer)
    layout, forms = folder.layout_of(state), named.forms()
    parts, num_files = named.parts(forms, _FILE_BYTES)
    content = StateFile(
        layout=layout,
        progress=progress or {},
        scheduler=None if scheduler is None else scheduler.state_dict(),
        tensors=forms,
        scalars=named.scalars,
        optimizer=named.optimizer,
    )
    return _Snapshot(
        parts=parts,
        num_files=num_files,
        state=content.to_json(),
        random=encode(random_state.capture(state.device), "random state"),
        layout=layout,
    )


def _check_same_everywhere(of_state: str) -> None:
    digests = differing(of_state) or [of_state]
    odd = [rank for rank, of_rank in enumerate(digests) if of_rank != digests[0]]
    if odd:
        raise ValueError(
            f"ranks {odd} have other tensors or another state of the optimizer than rank 0: every "
            f"rank must take the same steps with the same options"
        )


def _write(path: Path, snapshot: _Snapshot, group: dist.ProcessGroup | None) -> None:
    def tensors() -> dict[str, Any]:
        return folder.write_tensors(path, snapshot.parts, snapshot.num_files)

    def others() -> None:
        folder.write_json(path / folder.random_file(this_rank()), snapshot.random)
        if is_first():
            folder.write_json(path / folder.STATE, snapshot.state)
            if snapshot.base is not None:
                folder.write_json(path / BASE, snapshot.base)

    told = together(f"saving {path}", tensors, group)
    together(f"saving {path}", others, group)
    manifest.write(path, snapshot.layout, told=told, group=group)
