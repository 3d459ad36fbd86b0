"""Make the checkpoints of Accelerate's `save_state` safe: only a complete checkpoint is loaded.

A save writes a marker first and a manifest last (`checkpoints/storage/manifest.py`). If the job is
killed in between, `load_state` refuses the folder, even if it contained an older complete state. To
keep the older state, save to a new folder each time: `out/step-100`, or one of the names that
Accelerate counts up (automatic_checkpoint_naming). With these automatic names:

    - older folders are deleted after the manifest is written (stock deletes them before the save)
    - a folder that a killed job left unfinished is overwritten
    - `load_state()` without a folder loads the newest complete folder

Before a load, all files are compared with the manifest. `checkpoints/newest.py` says what happens
to a folder that has neither marker nor manifest. The manifest names only files that Accelerate
writes, so files of other hooks (`register_save_state_pre_hook`) are not verified. The folder must
be on a disk that all ranks share.

`checkpoints/storage/unpickle.py` reads the files of torch.distributed.checkpoint (DCP) without
running code. Accelerate reads the other files with weights_only=True, except for
`custom_checkpoint_*.pkl`, the state of objects that the script passed to
`register_for_checkpointing`: Accelerate unpickles any object in such a file
(accelerate/checkpointing.py, load_custom_state), so load it only from a source that you trust.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate.accelerator
from accelerate import Accelerator

from hf_moe_ep.checkpoints.newest import (
    check_resumable,
    find_newest_resumable,
    is_verifiable,
    list_series,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.planner import use_split_load_planner, use_spread_planner
from hf_moe_ep.checkpoints.storage.unpickle import loading_values
from hf_moe_ep.checkpoints.training.base import BASE
from hf_moe_ep.checkpoints.training.conversions import CONVERSIONS
from hf_moe_ep.checkpoints.training.extra import EXTRA
from hf_moe_ep.checkpoints.training.folder import describe_layout
from hf_moe_ep.etp import map_names_to_split_dims
from hf_moe_ep.integrations.optimizer_states import use_own_optimizer_states
from hf_moe_ep.integrations.random_states import reseed_on_other_ranks
from hf_moe_ep.integrations.saving import (
    check_bases,
    check_saved_with_same_type,
    check_state_dict_type,
    restore_all_extra,
    share_write_errors,
    write_bases,
    write_extra_and_conversions,
)
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import run_on_all, run_on_first
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.accelerate_and_trainer import list_prepared_models, list_prepared_optimizers
from hf_moe_ep.upstream.replaced import replaced

_AUTOMATIC_NAME = re.compile(r"checkpoint_\d+")
# The names of folders and files that accelerate/checkpointing.py and
# accelerate/utils/fsdp_utils.py write. All files in these folders count.
_FOLDERS = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_FILES = re.compile(
    r"(pytorch_model(_fsdp)?|model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?(_rank\d+)?"
    r"\.(bin|safetensors)|scaler\.pt|(random_states|custom_checkpoint)_\d+\.pkl"
    rf"|({'|'.join(Path(name).stem for name in (BASE, EXTRA, CONVERSIONS))})(_\d+)?\.json"
    rf"|{re.escape(manifest.STARTED)}"
)
# An earlier save to the folder may have left such files: it may have had more ranks than this save,
# or another type of state dict.
_FILES_OF_A_SAVE = ("random_states_*.pkl", "*.bin")
_FILES_OF_DCP = (".metadata", "*.distcp")


def save_state(
    original: Callable[..., Any], self: Accelerator, output_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """Wrap `Accelerator.save_state`: write a marker first and a manifest last.

    Experts are saved in hub order (placement/hub_order.py).

    Raises:
        ValueError: on every rank, with automatic names: the next folder exists already.
        RuntimeError: on every rank if one rank fails. The error names this rank and the cause, and
            the folder counts as unfinished.
    """
    states, project = _find_states(self), self.project_configuration
    automatic = project.automatic_checkpoint_naming
    if not states or (output_dir is None and not automatic):
        return original(self, output_dir, *args, **kw)
    check_state_dict_type(self)
    if automatic:
        folder = _get_automatic_parent(self) / f"checkpoint_{self.save_iteration}"
    else:
        folder = Path(output_dir)

    def begin() -> None:
        if automatic:
            _clear_unfinished(folder)
        manifest.begin(folder)
        _remove_files_of_earlier_save(folder)

    run_on_first(f"saving {folder}", begin)
    manifest.check_is_shared(folder)

    def save() -> Any:
        write_bases(list_prepared_models(self), folder)
        write_extra_and_conversions(list_prepared_models(self), folder)
        return original(self, os.fspath(folder), *args, **kw)

    split_dims = _find_split_dims(self)
    has_stages = any(state.stage is not None for state in states)
    with (
        _all_experts_in_hub_order(self),
        use_spread_planner(split_dims, has_stages=has_stages),
        use_own_optimizer_states(),
        # With automatic names Accelerate refuses an existing folder, and deletes older folders
        # before it saves.
        replaced(project, "automatic_checkpoint_naming", False),
        share_write_errors(accelerate.accelerator),
    ):
        saved = run_on_all(f"saving {folder}", save)
    manifest.write(folder, describe_layout(states[0]), belongs=_is_written_by_accelerate)
    if automatic and project.total_limit is not None:
        limit = project.total_limit
        run_on_first("deleting older checkpoints", lambda: _delete_older(folder, limit))
    return saved


def load_state(
    original: Callable[..., Any], self: Accelerator, input_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """Wrap `Accelerator.load_state`: load complete folders only, and refuse pickles with code.

    Every rank gets the number of micro-batches since the last optimizer step from rank 0.
    Otherwise ranks that did not exist when the state was saved would synchronise gradients in other
    micro-batches, and the other ranks would wait for them forever. If other ranks have saved,
    random generators are seeded anew, with a warning.

    Raises:
        ValueError: on every rank, before anything is loaded: the folder is damaged, unfinished,
            absent, or was saved with another type of state dict; or a file of DCP, which the error
            names, has objects other than plain values.
    """
    automatic = self.project_configuration.automatic_checkpoint_naming
    if not _find_states(self) or (input_dir is None and not automatic):
        return original(self, input_dir, *args, **kw)

    def choose() -> tuple[Path, bool]:
        if input_dir is None:
            chosen, verifiable = find_newest_resumable(_get_automatic_parent(self), _AUTOMATIC_NAME)
        else:
            chosen = Path(input_dir).expanduser()
            verifiable = is_verifiable(chosen)
        check_saved_with_same_type(self, chosen)
        return chosen, verifiable

    folder, verifiable = run_on_first("load_state", choose)
    check_resumable(folder, verifiable)
    check_state_dict_type(self)
    split_dims = _find_split_dims(self)
    with (
        loading_values(folder),
        _all_experts_in_hub_order(self),
        use_split_load_planner(split_dims),
        use_own_optimizer_states(),
    ):
        check_bases(list_prepared_models(self), folder)
        restore_all_extra(list_prepared_models(self), folder)
        loaded = original(self, os.fspath(folder), *args, **kw)
    # Accelerate reads `step` from the file with this rank's random states, and ignores errors.
    self.step = run_on_first("load_state", lambda: self.step)
    reseed_on_other_ranks(folder, _find_states(self)[0], _name_random_file, "torch_manual_seed")
    return loaded


def _name_random_file(rank: int, world: int) -> str:
    """Return the name of the file with a rank's random states (accelerate/checkpointing.py)."""
    return f"random_states_{rank}.pkl"


def _find_states(accelerator: Accelerator) -> list[ModelState]:
    """Return the states of all patched models that `accelerator` has prepared."""
    states = (find_state(model) for model in list_prepared_models(accelerator))
    return [state for state in states if state is not None]


def _find_split_dims(accelerator: Accelerator) -> dict[str, int]:
    """Join the results of `etp.map_names_to_split_dims` for all prepared models."""
    models = list_prepared_models(accelerator)
    return {name: dim for model in models for name, dim in map_names_to_split_dims(model).items()}


def _get_automatic_parent(accelerator: Accelerator) -> Path:
    """Return the parent of all automatically named folders (accelerate/accelerator.py)."""
    return Path(accelerator.project_dir, "checkpoints")


def _is_written_by_accelerate(name: str) -> bool:
    """Return True if Accelerate writes the file `name`, a path relative to the saved folder."""
    first, _, below_first = name.partition("/")
    return bool(_FOLDERS.fullmatch(first) if below_first else _FILES.fullmatch(first))


def _clear_unfinished(folder: Path) -> None:
    """Remove `folder` if a killed job left it unfinished; raise if it exists otherwise."""
    if manifest.is_unfinished(folder):
        shutil.rmtree(folder)
    elif folder.exists():
        raise ValueError(
            f"{folder} already exists; set accelerator.project_configuration.iteration to one "
            f"more than the number of the checkpoint that the run resumes from"
        )


def _remove_files_of_earlier_save(folder: Path) -> None:
    """Remove the files of an earlier save to this folder that this save may not overwrite."""
    dcp_folders = [p for p in folder.iterdir() if p.is_dir() and _FOLDERS.fullmatch(p.name)]
    stale = [file for pattern in _FILES_OF_A_SAVE for file in folder.glob(pattern)]
    stale += [f for part in dcp_folders for pattern in _FILES_OF_DCP for f in part.glob(pattern)]
    for file in stale:
        if _is_written_by_accelerate(file.relative_to(folder).as_posix()):
            file.unlink()


def _delete_older(written: Path, limit: int) -> None:
    """Delete unfinished checkpoints next to `written`, then the oldest until `limit` are left."""
    others = [path for path in list_series(written.parent, _AUTOMATIC_NAME) if path != written]
    for unfinished in filter(manifest.is_unfinished, others):
        manifest.try_to_delete(unfinished)
    complete = [path for path in others if path.exists()]
    for old in complete[: max(len(complete) + 1 - limit, 0)]:
        manifest.try_to_delete(old)


@contextmanager
def _all_experts_in_hub_order(accelerator: Accelerator) -> Iterator[None]:
    """Keep the experts and optimizer states of all prepared models in hub order in the block."""
    with ExitStack() as stack:
        for model in list_prepared_models(accelerator):
            optimizers = list_prepared_optimizers(accelerator)
            stack.enter_context(experts_in_hub_order(model, *optimizers))
        yield
