"""Write and load the Trainer's own checkpoints, which are complete or marked as unfinished.

A save has four steps (`checkpoints/storage/manifest.py`):

    1. Write the marker. From here on the folder counts as unfinished.
    2. Call `Trainer._save_checkpoint`, but postpone its push to the hub and its deletion of older
       checkpoints.
    3. Write the manifest. From here on the folder counts as complete.
    4. Push, then delete all unfinished checkpoints, and the oldest complete ones beyond
       `save_total_limit`.

Stock deletes older checkpoints in step 2. If the job were killed right after that, there might be
no complete checkpoint. `resume_from_checkpoint=True` resumes from the newest complete checkpoint. A
checkpoint that is given by its path is compared with its manifest before anything is loaded.

`load_model` also loads the experts of a model that is not sharded. Stock searches the files for the
parameter names of the model, but in hub layout experts have other names, so stock would report the
experts as missing and keep their old values. With adapters, stock saves and loads only the active
adapter, and `checkpoints/training/trained_without_peft.py` saves and loads all other
trained tensors.

`checkpoints/storage/unpickle.py` reads the files of torch.distributed.checkpoint (DCP) without
running code. The Trainer reads all other files with weights_only=True.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import transformers
from accelerate.utils import is_peft_model

from hf_moe_ep.checkpoints.hub.configs import save_configs
from hf_moe_ep.checkpoints.hub.read import find_weights, load_weights
from hf_moe_ep.checkpoints.newest import (
    check_resumable,
    find_newest_resumable,
    is_verifiable,
    list_series,
)
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.planner import use_split_load_planner, use_spread_planner
from hf_moe_ep.checkpoints.storage.unpickle import METADATA_FILE, loading_values
from hf_moe_ep.checkpoints.training.base import BASE, check_base, describe_base
from hf_moe_ep.checkpoints.training.folder import STATE, describe_layout, write_json
from hf_moe_ep.checkpoints.training.trained_without_peft import (
    WITHOUT_PEFT_FOLDER,
    check_tensors_without_peft,
    read_tensors_without_peft,
    write_tensors_without_peft,
)
from hf_moe_ep.etp import map_names_to_split_dims
from hf_moe_ep.integrations import shared_batches
from hf_moe_ep.integrations.optimizer_states import use_own_optimizer_states
from hf_moe_ep.integrations.random_states import read_saved_layout, reseed_on_other_ranks
from hf_moe_ep.integrations.saving import (
    check_saved_with_same_type,
    check_state_dict_type,
    get_state_dict_type,
    restore_all_extra,
    share_write_errors,
    write_extra_and_conversions,
)
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import run_on_all, run_on_first
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.accelerate_and_trainer import SAVE_IN_PROGRESS, get_checkpoint_folder
from hf_moe_ep.upstream.adapters import (
    has_adapters,
    learns_prompts,
    map_keys_by_adapter,
    restores_adapters_of_full_state,
)
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap

_CHECKPOINT = re.compile(r"checkpoint-\d+")
# This is `transformers.trainer.TRAINER_STATE_NAME`, but the import of that module takes seconds.
_TRAINER_STATE = "trainer_state.json"
# Files that a save does not overwrite if an earlier save to the folder had more ranks or another
# type of state dict.
_FILES_OF_A_SAVE = (
    "rng_state*.pth",
    "*/*.distcp",
    f"*/{METADATA_FILE}",
    "pytorch_model_fsdp*.bin",
    "optimizer*.bin",
    f"{WITHOUT_PEFT_FOLDER}/*",
)
# The key in the manifest's layout under which `_count_rows_per_step` is saved.
_ROWS = "rows_per_step"

# The calls that are postponed until the manifest is written, by the Trainer's output folder.
_postponed_calls: dict[str, list[Callable[[], None]]] = {}


def save_trainer_checkpoint(
    original: Callable[..., Any], self: transformers.Trainer, model: Any, trial: Any
) -> None:
    """Wrap `Trainer._save_checkpoint`: write a marker first and a manifest last."""
    state = find_state(self.model)
    if state is None:
        original(self, model, trial)
        return
    check_state_dict_type(self.accelerator)
    folder = get_checkpoint_folder(self, trial)
    split_dims = map_names_to_split_dims(self.model)

    def begin() -> None:
        manifest.begin(folder)
        _remove_files_of_earlier_save(folder)
        save_configs(self.model, folder)

    run_on_first(f"saving {folder}", begin)
    manifest.check_is_shared(folder)
    postponed = _postponed_calls[os.path.abspath(folder.parent)] = []
    try:
        with (
            experts_in_hub_order(self.model, self.optimizer),
            use_spread_planner(split_dims, has_stages=state.stage is not None),
            use_own_optimizer_states(),
        ):
            with share_write_errors(transformers.trainer):
                run_on_all(f"saving {folder}", lambda: original(self, model, trial))
            if (names := _list_names_saved_by_stock(self)) is not None:
                write_tensors_without_peft(self.model, folder, names)
    finally:
        del _postponed_calls[os.path.abspath(folder.parent)]
    if state.config.experts_dtype is not None:
        reshard(self.model)
        base = describe_base(self.model)
        run_on_first(f"saving {folder}", lambda: write_json(Path(folder, BASE), base))
    write_extra_and_conversions([self.model], folder)
    layout = describe_layout(state) | {_ROWS: _count_rows_per_step(self)}
    manifest.write(folder, layout, belongs=lambda name: name != SAVE_IN_PROGRESS)
    run_on_all(f"pushing {folder}, deleting older ones", lambda: [call() for call in postponed])


def postpone_push(
    original: Callable[..., Any], self: transformers.Trainer, checkpoint_folder: str
) -> None:
    """Wrap `Trainer._push_from_checkpoint`: push after the manifest is written.

    A checkpoint that is pushed without its manifest would count as unfinished on the hub.
    """
    postponed = _postponed_calls.get(os.path.dirname(os.path.abspath(checkpoint_folder)))
    if postponed is None:
        original(self, checkpoint_folder)
    else:
        postponed.append(partial(original, self, checkpoint_folder))


def postpone_rotation(
    original: Callable[..., Any],
    output_dir: str,
    save_total_limit: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `rotate_checkpoints`: delete older checkpoints after the manifest is written.

    Unfinished checkpoints are deleted first. Stock would count unfinished checkpoints towards
    `save_total_limit`, and would delete complete ones instead.
    """
    postponed = _postponed_calls.get(os.path.abspath(output_dir))
    if postponed is None:
        original(output_dir, save_total_limit, *args, **kwargs)
        return

    def delete() -> None:
        num_not_deleted = 0
        for folder in Path(output_dir).iterdir() if (save_total_limit or 0) > 0 else ():
            if _CHECKPOINT.fullmatch(folder.name) and manifest.is_unfinished(folder):
                num_not_deleted += not manifest.try_to_delete(folder)
        # Stock counts unfinished folders that could not be deleted, too.
        limit = None if save_total_limit is None else save_total_limit + num_not_deleted
        original(output_dir, limit, *args, **kwargs)

    postponed.append(delete)


def train(
    original: Callable[..., Any],
    self: transformers.Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `Trainer.train`, but resume from complete checkpoints only.

    There is a warning if the run has another number of rows per optimizer step than the saved run.

    Raises:
        ValueError: on every rank, before anything is loaded: the checkpoint is damaged, unfinished
            or absent, or was saved with another type of state dict or without an optimizer.
    """
    if self.model is None or find_state(self.model) is None or not resume_from_checkpoint:
        return original(self, resume_from_checkpoint, *args, **kwargs)

    def choose() -> tuple[Path, bool]:
        if resume_from_checkpoint is True:
            chosen, verifiable = find_newest_resumable(Path(self.args.output_dir), _CHECKPOINT)
        else:
            chosen = Path(os.fspath(resume_from_checkpoint))
            verifiable = is_verifiable(chosen)
            _check_is_of_trainer(chosen)
        if self.is_fsdp_enabled:
            _check_has_optimizer(chosen)
        check_saved_with_same_type(self.accelerator, chosen)
        return chosen, verifiable

    folder, verifiable = run_on_first("resuming", choose)
    check_resumable(folder, verifiable)
    run_on_first("resuming", lambda: _warn_if_rows_per_step_differ(self, folder))
    return original(self, os.fspath(folder), *args, **kwargs)


def _count_rows_per_step(trainer: transformers.Trainer) -> int:
    """Return the number of rows of one optimizer step, summed over all data ranks."""
    args = trainer.args
    if trainer.accelerator.split_batches:  # a batch of the loader is divided over all data ranks
        return args.train_batch_size * args.gradient_accumulation_steps
    return trainer.get_total_train_batch_size(args)


def _warn_if_rows_per_step_differ(trainer: transformers.Trainer, folder: Path) -> None:
    """Warn if the run has another number of rows per optimizer step than the saved run.

    The Trainer counts the optimizer steps of the saved run, and skips as many steps of this run.
    If this run has half as many rows per step, for example on half as many ranks, half of the rows
    that were trained in this epoch are not skipped, and are trained for a second time.
    """
    saved, rows = read_saved_layout(folder).get(_ROWS), _count_rows_per_step(trainer)
    if saved is None or saved == rows or trainer.args.auto_find_batch_size:
        return  # With auto_find_batch_size the Trainer restores the batch size of the checkpoint.
    size, accumulation = trainer.args.train_batch_size, trainer.args.gradient_accumulation_steps
    data_ranks = rows // (size * accumulation)
    rows_per_rank, rest = divmod(saved, data_ranks)
    if rest:
        remedy = (
            f"no batch size of {data_ranks} data ranks gives {saved} rows, so resume on a number "
            f"of data ranks that divides {saved}"
        )
    else:
        fitting = max(n for n in range(1, size + 1) if rows_per_rank % n == 0)
        remedy = (
            f"to continue at the same row, set per_device_train_batch_size={fitting} and "
            f"gradient_accumulation_steps={rows_per_rank // fitting}"
        )
    warnings.warn(
        f"{folder} was saved with {saved} rows per optimizer step, and this run has {rows} "
        f"({data_ranks} data ranks, per_device_train_batch_size={size}, "
        f"gradient_accumulation_steps={accumulation}): the Trainer finds its position in the data "
        f"by counting optimizer steps, so rows are repeated or left out; {remedy}",
        stacklevel=2,
    )


def _check_is_of_trainer(folder: Path) -> None:
    """Raise ValueError if a folder is not a checkpoint that the Trainer has written."""
    if (folder / _TRAINER_STATE).is_file():
        return
    advice = "name a folder that the Trainer has written, such as out/checkpoint-100"
    if checkpoints := list_series(folder, _CHECKPOINT):
        advice = f"name a checkpoint in it, such as {checkpoints[-1]}"
    elif (folder / STATE).is_file():
        advice = "it was written by save_checkpoint, so load it with load_checkpoint"
    raise ValueError(
        f"{folder} is not a checkpoint of the Trainer, because it has no {_TRAINER_STATE}; {advice}"
    )


def _check_has_optimizer(folder: Path) -> None:
    """Raise ValueError if a checkpoint has only a model, from which FSDP runs cannot resume.

    All other checkpoints have random states.
    """
    if not any([*folder.glob("optimizer*"), *folder.glob("rng_state*")]):
        raise ValueError(
            f"{folder} was saved with save_only_model=True, so it has no state of an optimizer; "
            f"start a new run from its weights"
        )


def load_optimizer(
    original: Callable[..., Any],
    self: transformers.Trainer,
    checkpoint: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Trainer._load_optimizer_and_scheduler`: refuse pickles that contain code.

    Each rank reads the parts of the files that its shards need, so the layout may differ from the
    layout of the saved run. The state is loaded in hub order (placement/hub_order.py).
    """
    if checkpoint is None or self.model is None or find_state(self.model) is None:
        return original(self, checkpoint, *args, **kwargs)
    with (
        loading_values(Path(checkpoint)),
        experts_in_hub_order(self.model, self.optimizer),
        use_split_load_planner(map_names_to_split_dims(self.model)),
        use_own_optimizer_states(),
    ):
        return original(self, checkpoint, *args, **kwargs)


def load_random_states(
    original: Callable[..., Any],
    self: transformers.Trainer,
    checkpoint: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap `Trainer._load_rng_state`: seed random generators anew if other ranks have saved.

    Stock does not change the generators of a rank if the checkpoint has no file for this rank. Each
    rank reads its own file. If one rank cannot read its file, every rank raises an error.
    """
    state = None if self.model is None else find_state(self.model)
    if checkpoint is None or state is None:
        return original(self, checkpoint, *args, **kwargs)
    # The Trainer begins a run with the same seed on all ranks.
    if not reseed_on_other_ranks(
        Path(checkpoint), state, _name_random_file, "cpu", python_is_shared=True
    ):
        load = partial(original, self, checkpoint, *args, **kwargs)
        return run_on_all(f"loading the random states of {checkpoint}", load)
    shared_batches.share_generators(self.accelerator)
    return None


def _name_random_file(rank: int, world: int) -> str:
    """Return the name of the file of random states of a rank (transformers/trainer.py)."""
    return f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"


def load_model(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `_load_from_checkpoint` and `_load_best_model`: load experts that stock would not find.

    `load_weights` loads a model that is not sharded and has no adapters, with its experts. All
    other models are loaded by stock code, with our planner and unpickler.
    """
    state, model = None if self.model is None else find_state(self.model), unwrap(self.model)
    if state is None:
        return original(self, *args, **kwargs)
    arguments = [*args, *kwargs.values()]  # `_load_best_model` has no arguments.
    folder = arguments[0] if arguments else self.state.best_model_checkpoint
    restore_all_extra([model], Path(folder))
    if state.meshes is not None:
        reshard(model)
        check_base(Path(folder), model)
    if self.is_fsdp_enabled or state.meshes is not None or has_adapters(model):
        with (
            loading_values(Path(folder)),
            experts_in_hub_order(self.model, self.optimizer),
            use_split_load_planner(map_names_to_split_dims(self.model)),
        ):
            if (names := _list_names_saved_by_stock(self)) is None:
                return original(self, *args, **kwargs)
            is_full = get_state_dict_type(self.accelerator) == "FULL_STATE_DICT"
            if self.is_fsdp_enabled and is_full and not restores_adapters_of_full_state():
                raise ValueError(
                    f"accelerate {accelerate.__version__} restores no adapters from {folder}, "
                    f"which was saved with FULL_STATE_DICT; install accelerate>=1.15, or train "
                    f"with fsdp_state_dict_type: SHARDED_STATE_DICT"
                )
            # PEFT itself restores most of the parameters that compute a prompt.
            strict = not learns_prompts(model)
            saved = check_tensors_without_peft(self.model, Path(folder), names, strict=strict)
            loaded = original(self, *args, **kwargs)
            read_tensors_without_peft(self.model, Path(folder), saved)
            return loaded
    parameters = [name for name, _ in model.named_parameters()]
    weights = find_weights(model, folder, state.plan, parameters)
    load_weights(model, weights.stored, self.args.device)
    return None


def _list_names_saved_by_stock(trainer: transformers.Trainer) -> set[str] | None:
    """List the tensors that stock code saves of a PeftModel. Return None for any other model.

    With SHARDED_STATE_DICT Accelerate saves the active adapter. With FULL_STATE_DICT it saves all
    trainable parameters and all buffers (`_get_model_state_dict` in
    accelerate/utils/fsdp_utils.py). Without FSDP the Trainer saves all adapters.
    """
    model: Any = unwrap(trainer.model)
    if not is_peft_model(model):
        return None
    if trainer.is_fsdp_enabled and get_state_dict_type(trainer.accelerator) == "FULL_STATE_DICT":
        trained = {get_canonical_name(n) for n, p in model.named_parameters() if p.requires_grad}
        return trained | {get_canonical_name(name) for name, _ in iterate_persistent_buffers(model)}
    if learns_prompts(model):
        return set()  # PEFT saves the prompts that its encoder computes, not the encoder.
    tensors = {get_canonical_name(name): p.detach() for name, p in model.named_parameters()}
    tensors |= {
        get_canonical_name(name): buffer for name, buffer in iterate_persistent_buffers(model)
    }
    by_adapter = map_keys_by_adapter(model, tensors, save_embedding_layers=False)
    if trainer.is_fsdp_enabled:
        return set(by_adapter.get(model.active_adapter, {}).values())
    return {name for keys in by_adapter.values() for name in keys.values()}


def _remove_files_of_earlier_save(folder: Path) -> None:
    """Remove the files of an earlier save to this folder that this save may not overwrite.

    If the earlier save had more ranks, a later run on as many ranks would resume with outdated
    random states. If it had another type of state dict, a run of that type would resume with an
    outdated model.
    """
    for pattern in _FILES_OF_A_SAVE:
        for file in folder.glob(pattern):
            file.unlink()
