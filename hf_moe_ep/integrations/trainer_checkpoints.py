"""The Trainer's own checkpoints of a patched model: complete, or not there.

Saving puts a marker first and a manifest last (`checkpoints/storage/manifest.py`). Older ones are
deleted after that, where stock deletes them before, and torn ones do not count as checkpoints to
keep; a push to the hub waits for the manifest too. `resume_from_checkpoint=True` takes the newest
complete one; one that is named is read against its manifest before anything is loaded.

A checkpoint without our marker was written by stock, or before there were manifests: it is loaded
with a warning. With the marker and no manifest it was not finished. Models that are not patched
go through stock code as it is. `accelerate_states.py` does the same for `Accelerator.save_state`.

A model that is not sharded is loaded with its experts too: stock looks in a file of hub layout for
the model's own names, says that those of experts are missing, and goes on with what they were
before. And nothing that DCP reads runs code (`checkpoints/storage/unpickle.py`), where torch runs
whatever is in its files. The Trainer reads all other files with weights_only=True by itself.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from hf_moe_ep.checkpoints.hub.configs import save_configs
from hf_moe_ep.checkpoints.hub.read import find_weights, load_weights
from hf_moe_ep.checkpoints.newest import check_resumable, is_verifiable, newest_resumable
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.planner import planned_by_each
from hf_moe_ep.checkpoints.storage.unpickle import values_alone
from hf_moe_ep.checkpoints.training.base import BASE, check_base, describe_base
from hf_moe_ep.checkpoints.training.folder import layout_of, write_json
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.together import on_first, together
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.adapters import has_adapters
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.training_frameworks import (
    checkpoint_folder,
    end_of_checkpoint,
)

_CHECKPOINT = re.compile(r"checkpoint-\d+")


def save_checkpoint(
    original: Callable[..., Any], self: transformers.Trainer, model: Any, trial: Any
) -> None:
    """`Trainer._save_checkpoint`, between a marker and a manifest."""
    state = find_state(self.model)
    if state is None:
        original(self, model, trial)
        return
    folder = checkpoint_folder(self, trial)

    def begin() -> None:
        manifest.begin(folder)
        _remove_of_ranks(folder)
        save_configs(self.model, folder)

    on_first(f"saving {folder}", begin)
    in_order = experts_in_hub_order(self.model, self.optimizer)
    with _held_back(self) as held, in_order, planned_by_each():
        together(f"saving {folder}", lambda: original(self, model, trial))
    if state.config.experts_dtype is not None:
        reshard(self.model)
        base = describe_base(self.model)
        on_first(f"saving {folder}", lambda: write_json(Path(folder, BASE), base))
    manifest.write(folder, layout_of(state))
    together(f"pushing {folder}, deleting older ones", lambda: [call() for call in held])


def train(
    original: Callable[..., Any],
    self: transformers.Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`Trainer.train`, resuming from complete checkpoints alone.

    Raises:
        ValueError: on every rank, before anything is loaded: the checkpoint is damaged or was not
            finished, or there is none.
    """
    if self.model is None or find_state(self.model) is None or not resume_from_checkpoint:
        return original(self, resume_from_checkpoint, *args, **kwargs)

    def choose() -> tuple[Path, bool]:
        if resume_from_checkpoint is True:
            return newest_resumable(Path(self.args.output_dir), _CHECKPOINT)
        given = Path(os.fspath(resume_from_checkpoint))
        return given, is_verifiable(given)

    folder, verifiable = on_first("resuming", choose)
    check_resumable(folder, verifiable)
    return original(self, os.fspath(folder), *args, **kwargs)


def load_safely(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Load as the Trainer does, with experts in hub order; nothing that DCP reads runs code."""
    if self.model is None or find_state(self.model) is None:
        return original(self, *args, **kwargs)
    with values_alone(), experts_in_hub_order(self.model, self.optimizer):
        return original(self, *args, **kwargs)


def load_model(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Load every parameter from a checkpoint's hub layout into a model that one process holds."""
    state, model = None if self.model is None else find_state(self.model), unwrap(self.model)
    named = [*args, *kwargs.values()]  # none for the best
    folder = named[0] if named else self.state.best_model_checkpoint
    if state is not None and state.meshes is not None:
        reshard(model)
        check_base(Path(folder), model)
    sharded = self.is_fsdp_enabled or (state is not None and state.meshes is not None)
    if state is None or sharded or has_adapters(model):
        return load_safely(original, self, *args, **kwargs)
    names = [name for name, _ in model.named_parameters()]
    load_weights(model, find_weights(model, folder, state.plan, names), self.args.device)
    return None


def _remove_of_ranks(folder: Path) -> None:
    """Remove what ranks of an earlier save left here: there may have been more of them.

    A rank that is there again later would go on with random numbers of that save.
    """
    for pattern in ("rng_state*.pth", "*/*.distcp"):
        for file in folder.glob(pattern):
            file.unlink()


@contextmanager
def _held_back(trainer: transformers.Trainer) -> Iterator[list[Callable[[], None]]]:
    """Keep for later the calls that `_save_checkpoint` ends with: a push, `rotate_checkpoints`.

    On the hub a checkpoint without a manifest would count as unfinished for ever.
    """
    held: list[Callable[[], None]] = []

    def rotate(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        held.append(partial(_rotate, stock, *args, **kwargs))

    def push(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        held.append(partial(stock, *args, **kwargs))

    with end_of_checkpoint(trainer, rotate, push):
        yield held


def _rotate(
    original: Callable[..., Any],
    output_dir: str,
    save_total_limit: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`rotate_checkpoints`, which by its number would keep a torn one and delete a complete one."""
    for folder in Path(output_dir).iterdir() if (save_total_limit or 0) > 0 else ():
        started = (folder / manifest.STARTED).exists()
        complete = (folder / manifest.MANIFEST).exists()
        if _CHECKPOINT.fullmatch(folder.name) and started and not complete:
            shutil.rmtree(folder)
    original(output_dir, save_total_limit, *args, **kwargs)
