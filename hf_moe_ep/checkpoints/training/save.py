"""Everything a training run goes on from, saved at one layout and loaded at any other.

    manifest.json            last: what is there, sizes, hashes (`manifest.py`)
    hf_moe_ep.json           first: this folder is ours
    tensors/shard-*          parameters, buffers, moments (`named_state.py`): safetensors, written
                             and read by torch.distributed.checkpoint, each rank its own part
    state.json               the rest of the optimizer, scheduler, progress, layout
    random-00003.json        the random generators of rank 3
    config.json, ..          of the model, for `hf-moe-ep convert`

No file is a pickle. Nothing is renamed but the manifest: a folder without one is not there, and
an older checkpoint stays the newest. An error of one rank is an error on every rank.

In the background (`asynchronous=True`) the step waits for a copy to the host alone. Ranks then
meet over a group of their own, because collectives of two threads on one group would mix.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hf_moe_ep.checkpoints.hub.configs import BESIDE, CONFIGS, save_configs
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.json_values import decode, encode
from hf_moe_ep.checkpoints.training import rng as random_state
from hf_moe_ep.checkpoints.training.background import SaveHandle, Saver, host_copy, is_written
from hf_moe_ep.checkpoints.training.same_run import check_model, check_optimizer
from hf_moe_ep.checkpoints.training.tensors import (
    NamedState,
    collect,
    model_slots,
    new_moment,
    parameter_names,
    put_optimizer,
)
from hf_moe_ep.ranks.together import (
    check_alike,
    check_everyone_calls,
    gather,
    is_first,
    on_first,
    this_rank,
    together,
    world_size,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, find_state, layout_of

_TENSORS, _STATE = "tensors", "state.json"
# Each file is built in host memory before it is written.
_FILE_BYTES = 1 << 30


@dataclass
class _Snapshot:
    """What one rank contributes to a checkpoint."""

    named: NamedState
    document: dict[str, Any]
    random: dict[str, Any]
    layout: dict[str, Any]
    files: dict[str, int]

    def digest(self) -> str:
        """Of what must be alike on every rank."""
        mine = json.dumps([self.document["tensors"], self.document["rest"]])
        return hashlib.sha256(mine.encode()).hexdigest()


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
    buffers are saved: its frozen base is where it was loaded from.

    Args:
        directory: of this checkpoint alone (`out/step-100`), shared by all ranks. What an
            unfinished save left there is removed.
        model: patched, sharded or (in one process) not.
        optimizer: of the model's parameters as they are now. State of a parameter's own shape and
            single numbers fit another layout; anything else is refused.
        scheduler: with `state_dict()`, or None.
        progress: where training stands (step, epoch, position in the data): numbers, strings,
            lists, tuples and dicts; rank 0's is kept.
        asynchronous: return when the state is copied to host memory; write in the background. A
            later save waits for it, and raises its error. Call `wait()` before the process ends.

    Returns:
        A handle; without `asynchronous` its `wait()` has nothing left to do.

    Raises:
        ValueError: on every rank: `directory` holds a complete checkpoint or other files, the model
            is not patched, or something cannot be saved.
        RuntimeError: on every rank, naming the rank that failed and why; what was there before is
            untouched and training can go on.
    """
    check_everyone_calls("save_checkpoint")
    path, state = Path(directory).absolute(), _patched(model)  # the thread outlives an os.chdir
    check_alike("save_checkpoint", directory=os.fspath(directory), asynchronous=asynchronous)
    saver = state.saver = state.saver or Saver()
    saver.wait()
    reshard(model)

    def prepare() -> tuple[_Snapshot, str]:
        if is_first():
            _check_free(path)
        snapshot = _take(model, optimizer, scheduler, progress, state)
        if asynchronous:
            named = snapshot.named
            named.tensors = {name: host_copy(t) for name, t in named.tensors.items()}
        return snapshot, snapshot.digest()

    snapshot, digest = together("save_checkpoint", prepare)
    _same_everywhere(gather(digest))
    on_first(f"clearing {path}", lambda: _clear(path, model))
    if asynchronous:
        return saver.start(path, partial(_write, path, snapshot), _device(state))
    _write(path, snapshot, None)
    return SaveHandle(path)


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
        optimizer: with the same parameters in its groups; state and options are replaced.
        scheduler: its state is replaced; None ignores what was saved of one.
        verify: read every file against its hash first; else sizes alone.

    Returns:
        The `progress` that was saved, {} for None.

    Raises:
        ValueError: on every rank, before anything was changed: no complete checkpoint, a damaged
            file, another model or optimizer; it names the file or the tensors.
        RuntimeError: on every rank: a rank could not read.
    """
    check_everyone_calls("load_checkpoint")
    state = _patched(model)
    check_alike("load_checkpoint", verify=verify)
    if state.saver is not None:
        state.saver.wait()
    reshard(model)
    path = _find(directory)
    if verify:
        manifest.check(path)

    def prepare() -> tuple[dict[str, Any], dict[str, Tensor]]:
        document = _read_document(path)
        check_model(model, document, str(path))
        check_optimizer(model, optimizer, document["rest"], str(path))
        if scheduler is not None and document["scheduler"] is None:
            raise ValueError(f"{path} was saved without a scheduler; call without one")
        return document, _targets(model, optimizer, document)

    document, targets = together(f"reading {path}", prepare)
    together(f"reading {path}", lambda: _read_tensors(path, targets))

    def finish() -> None:
        _put_model(model, targets, document["rest"]["scalars"])
        put_optimizer(model, optimizer, document["rest"], targets)
        if scheduler is not None:
            scheduler.load_state_dict(decode(document["scheduler"]))
        _put_random(path, document["layout"], state)

    together(f"reading {path}", finish)
    return dict(decode(document["progress"]))


def _find(directory: str | os.PathLike[str]) -> Path:
    return on_first(
        f"looking for a checkpoint in {directory}", lambda: manifest.newest_complete(directory)
    )


def _same_everywhere(digests: list[str]) -> None:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ValueError(
            f"ranks {odd} have other tensors or another state of the optimizer than rank 0: every "
            f"rank must take the same steps with the same options"
        )


def _patched(model: nn.Module) -> ModelState:
    state = find_state(model)
    if state is None:
        raise ValueError("this model is not patched; call patch(model) or apply_ep_fsdp2(model)")
    return state


def _device(state: ModelState) -> torch.device:
    return torch.device("cpu") if state.meshes is None else state.meshes.device


def _take(
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    progress: dict[str, Any] | None,
    state: ModelState,
) -> _Snapshot:
    if not isinstance(progress, dict | None):
        raise ValueError(f"progress is {progress!r}; make it a dict, like {{'step': 100}}")
    named, layout = collect(model, optimizer), layout_of(state)
    of_scheduler = None if scheduler is None else encode(scheduler.state_dict(), "scheduler")
    document = {
        "layout": layout,
        "progress": encode(progress or {}, "progress"),
        "scheduler": of_scheduler,
        "rest": named.rest,
        "tensors": named.index(),
    }
    random = encode(random_state.capture(_device(state)), "random state")
    return _Snapshot(named, document, random, layout, named.files(_FILE_BYTES * world_size()))


def _is_ours(name: str) -> bool:
    known = (_TENSORS, _STATE, *CONFIGS, manifest.STARTED, manifest.PARTIAL)
    return name in known or name.startswith(BESIDE) or Path(name).match("random-*.json")


def _check_free(path: Path) -> None:
    if is_written(path):
        raise ValueError(f"another model is being saved to {path}; save each to its own directory")
    if (path / manifest.MANIFEST).exists():
        manifest.check_sizes(path)
        raise ValueError(f"{path} holds a complete checkpoint; save to another directory")
    found = {item.name for item in path.iterdir()} if path.exists() else set()
    # Names like config.json are others' too: without the marker, which comes first, none is ours.
    marked = manifest.STARTED in found
    others = [name for name in found if not (marked and _is_ours(name))]
    if others:
        raise ValueError(
            f"{path} holds {', '.join(sorted(others)[:5])}, no part of a checkpoint; save to a "
            f"directory of its own, like {path / 'step-100'}"
        )


def _clear(path: Path, model: nn.Module) -> None:
    for item in path.iterdir() if path.exists() else ():
        if item.name == manifest.STARTED:  # stays: a kill here leaves a folder known as ours
            continue
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    manifest.begin(path)
    (path / _TENSORS).mkdir()
    save_configs(model, path)


def _write(path: Path, snapshot: _Snapshot, group: dist.ProcessGroup | None) -> None:
    def tensors() -> None:
        if not snapshot.named.tensors:
            return
        with _in_one_process_too():
            save(
                snapshot.named.tensors,
                storage_writer=HuggingFaceStorageWriter(
                    str(path / _TENSORS), snapshot.files, save_distributed=True
                ),
                planner=DefaultSavePlanner(),
                process_group=group,
            )

    def others() -> None:
        _write_json(path / f"random-{this_rank():05d}.json", snapshot.random)
        if is_first():
            _write_json(path / _STATE, snapshot.document)

    together(f"saving {path}", tensors, group)
    together(f"saving {path}", others, group)
    manifest.write(path, snapshot.layout, group=group)


def _read_tensors(path: Path, targets: dict[str, Tensor]) -> None:
    with _in_one_process_too():
        load(
            targets,
            storage_reader=HuggingFaceStorageReader(str(path / _TENSORS)),
            planner=DefaultLoadPlanner(),
        )


@contextmanager
def _in_one_process_too() -> Iterator[None]:
    """Without what DCP says where there is no process group, which is fine here."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _read_document(path: Path) -> dict[str, Any]:
    """`state.json`. DCP reads every file beside it, so one that nobody named would be read too."""
    known = manifest.read(path)["files"]
    if _STATE not in known:
        raise ValueError(
            f"{path} was written by the Trainer, not by save_checkpoint; go on from it by "
            f"trainer.train(resume_from_checkpoint={str(path)!r})"
        )
    for file in sorted((path / _TENSORS).iterdir()):
        if f"{_TENSORS}/{file.name}" not in known:
            raise ValueError(f"{file} is not in {manifest.MANIFEST}; remove it")
    return dict(json.loads((path / _STATE).read_text(encoding="utf-8")))


def _targets(model: nn.Module, optimizer: Any, document: dict[str, Any]) -> dict[str, Tensor]:
    """Where each tensor is read to: the model's own storage where the file has its form."""
    index, targets = document["tensors"], {}
    for name, slot in model_slots(model).items():
        if slot.tensor.ndim:
            convert = slot.to_file is not None
            targets[f"model.{name}"] = slot.saved(slot.tensor) if convert else slot.tensor
    _, slots = parameter_names(model, optimizer)
    for parameter, values in document["rest"]["optimizer"].items():
        dtype = index.get(f"model.{parameter}", {}).get("dtype")
        for entry in values.values():
            if name := entry.get("__in_file__"):
                targets[name] = new_moment(slots[parameter], index[name]["dtype"], dtype)
    return targets


@torch.no_grad()
def _put_model(model: nn.Module, targets: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    for name, slot in model_slots(model).items():
        if not slot.tensor.ndim:
            slot.tensor.copy_(decode(scalars[name]))
        elif slot.from_file is not None:
            slot.tensor.copy_(slot.fit(targets[f"model.{name}"]))


def _put_random(path: Path, saved: dict[str, Any], state: ModelState) -> None:
    now, device, rank = layout_of(state), _device(state), this_rank()
    before, here = (x["world_size"] // x["sp_size"] for x in (saved, now))

    def of(number: int) -> dict[str, Any]:
        text = (path / f"random-{number:05d}.json").read_text(encoding="utf-8")
        return dict(decode(json.loads(text)))

    first = of(0)
    if before == here and first["device"] == device.type:
        place = rank % now["sp_size"] % saved["sp_size"]
        random_state.restore(of(rank // now["sp_size"] * saved["sp_size"] + place), device)
        return
    random_state.reseed(first, rank // now["sp_size"])
    if is_first():
        warnings.warn(
            f"{path} was saved by {before} data ranks on {first['device']}, here are {here} on "
            f"{device.type}: random generators are seeded anew, dropout and shuffling will differ",
            stacklevel=2,
        )


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
