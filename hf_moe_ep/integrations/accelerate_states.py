"""Accelerate's own checkpoints of a patched model: `save_state` and `load_state`.

A save puts a marker first and a manifest last, as the Trainer's and `save_checkpoint` do
(`checkpoints/storage/manifest.py`). A kill in between leaves a folder that `load_state` refuses,
also where it held an older state before: saves to a folder of their own (`out/step-100`, or
Accelerate's automatic names) keep that older one. With automatic names, older folders are deleted
after the manifest is written, where stock deletes them before it saves; a folder that a kill left
unfinished is saved anew, and `load_state()` without a folder takes the newest complete one.

Loading compares all files with the manifest first. A folder without marker and manifest was written
by stock or by an older version; it is loaded with a warning. Models that are not patched go through
stock code as it is.

The manifest names the files that Accelerate writes. Whatever else lies in the folder, hooks of
`register_save_state_pre_hook` included, is not verified. The folder has to be seen by all ranks.

Nothing that DCP reads runs code (`checkpoints/storage/unpickle.py`), and Accelerate reads all other
files with weights_only=True, but for one kind: `custom_checkpoint_*.pkl`, the state of objects that
the script gave to `register_for_checkpointing`. Accelerate unpickles whatever is in these files
(accelerate/checkpointing.py, load_custom_state), so load them from sources that you trust alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_moe_ep.checkpoints.newest import (
    check_resumable,
    in_series,
    is_verifiable,
    newest_resumable,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.planner import planned_by_each
from hf_moe_ep.checkpoints.storage.unpickle import loading_values
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.folder import layout_of
from hf_moe_ep.integrations.saving import check_bases, write_bases
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.together import on_first, together
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.training_frameworks import prepared_models, prepared_optimizers

_NAMED = re.compile(r"checkpoint_\d+")
# Names of accelerate/checkpointing.py and accelerate/utils/fsdp_utils.py; of folders, all in them.
_FOLDERS = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_FILES = re.compile(
    r"(pytorch_model(_fsdp)?|model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?(_rank\d+)?"
    r"\.(bin|safetensors)|scaler\.pt|(random_states|custom_checkpoint)_\d+\.pkl"
    rf"|{Path(BASE).stem}(_\d+)?\.json|{re.escape(manifest.STARTED)}"
)
# Files that ranks of an earlier save left; there may have been more of them.
_OF_RANKS = ("random_states_*.pkl", "*_rank*.bin")
_OF_DCP = (".metadata", "*.distcp")


def save_state(
    original: Callable[..., Any], self: Accelerator, output_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """`Accelerator.save_state`: between a marker and a manifest, with experts in hub order.

    Raises:
        ValueError: on every rank: Accelerate would choose the name of a folder that is there.
        RuntimeError: on every rank, naming the rank that failed and why; the folder is unfinished.
    """
    states, names = _states(self), self.project_configuration
    automatic = names.automatic_checkpoint_naming
    if not states or (output_dir is None and not automatic):
        return original(self, output_dir, *args, **kw)
    folder = _named_folders(self) / f"checkpoint_{self.save_iteration}" if automatic else output_dir
    folder = Path(folder)

    def begin() -> None:
        if automatic:
            _clear_unfinished(folder)
        manifest.begin(folder)
        _remove_of_ranks(folder)

    on_first(f"saving {folder}", begin)

    def save() -> Any:
        write_bases(prepared_models(self), folder)
        return original(self, os.fspath(folder), *args, **kw)

    with _all_in_hub_order(self), planned_by_each(), _no_automatic_names(self):
        saved = together(f"saving {folder}", save)
    manifest.write(folder, layout_of(states[0]), belongs=_is_of_accelerate)
    if automatic and names.total_limit is not None:
        limit = names.total_limit
        on_first("deleting older checkpoints", lambda: _delete_older(folder, limit))
    return saved


def load_state(
    original: Callable[..., Any], self: Accelerator, input_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """`Accelerator.load_state`: of complete folders alone, and no code from what DCP reads.

    Raises:
        ValueError: on every rank, before anything is loaded, the folder is damaged or was not
            finished, or there is none; or a file of DCP holds more than values. It is named.
    """
    automatic = self.project_configuration.automatic_checkpoint_naming
    if not _states(self) or (input_dir is None and not automatic):
        return original(self, input_dir, *args, **kw)

    def choose() -> tuple[Path, bool]:
        if input_dir is None:
            return newest_resumable(_named_folders(self), _NAMED)
        given = Path(input_dir).expanduser()
        return given, is_verifiable(given)

    folder, verifiable = on_first("load_state", choose)
    check_resumable(folder, verifiable)
    with loading_values(folder), _all_in_hub_order(self):
        check_bases(prepared_models(self), folder)
        return original(self, os.fspath(folder), *args, **kw)


def _states(accelerator: Accelerator) -> list[ModelState]:
    """Return the states of the patched models among those that were prepared."""
    found = (find_state(model) for model in prepared_models(accelerator))
    return [state for state in found if state is not None]


def _named_folders(accelerator: Accelerator) -> Path:
    """Return the folder in which Accelerate chooses names (accelerate/accelerator.py)."""
    return Path(accelerator.project_dir, "checkpoints")


def _is_of_accelerate(name: str) -> bool:
    """Tell a file that Accelerate writes, by its path in the folder of a save, from others."""
    first, _, rest = name.partition("/")
    return bool(_FOLDERS.fullmatch(first) if rest else _FILES.fullmatch(first))


def _clear_unfinished(folder: Path) -> None:
    """Remove a folder that a kill left unfinished; ValueError, as stock's, for any other one."""
    if _is_torn(folder):
        shutil.rmtree(folder)
    elif folder.exists():
        raise ValueError(
            f"{folder} already exists; set accelerator.project_configuration.iteration to one "
            f"more than the number of the checkpoint that the run goes on from"
        )


def _is_torn(folder: Path) -> bool:
    return (folder / manifest.STARTED).exists() and not (folder / manifest.MANIFEST).exists()


def _remove_of_ranks(folder: Path) -> None:
    """Remove what ranks of an earlier save left in a folder that is saved to again."""
    parts = [path for path in folder.iterdir() if path.is_dir() and _FOLDERS.fullmatch(path.name)]
    stale = [file for pattern in _OF_RANKS for file in folder.glob(pattern)]
    stale += [file for part in parts for pattern in _OF_DCP for file in part.glob(pattern)]
    for file in stale:
        if _is_of_accelerate(file.relative_to(folder).as_posix()):
            file.unlink()


def _delete_older(written: Path, limit: int) -> None:
    """Delete unfinished checkpoints beside one that was written, and the oldest over the limit."""
    others = [path for path in in_series(written.parent, _NAMED) if path != written]
    for torn in filter(_is_torn, others):
        shutil.rmtree(torn)
    complete = [path for path in others if path.exists()]
    for old in complete[: max(len(complete) + 1 - limit, 0)]:
        shutil.rmtree(old)


@contextmanager
def _no_automatic_names(accelerator: Accelerator) -> Iterator[None]:
    """Let Accelerate save to the folder that it is given.

    With automatic names it refuses a folder that is there, and deletes older ones before it saves.
    """
    names = accelerator.project_configuration
    before = names.automatic_checkpoint_naming
    names.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        names.automatic_checkpoint_naming = before


@contextmanager
def _all_in_hub_order(accelerator: Accelerator) -> Iterator[None]:
    """Let experts of all models that were prepared, and their moments, lie in hub order."""
    with ExitStack() as stack:
        for model in prepared_models(accelerator):
            optimizers = prepared_optimizers(accelerator)
            stack.enter_context(experts_in_hub_order(model, *optimizers))
        yield
