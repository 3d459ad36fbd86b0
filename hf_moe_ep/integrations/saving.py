"""Save a patched model from Accelerate, the Trainer and PEFT, in the layout of stock files.

Hub layout has the same keys and shapes as the model's checkpoint on the hub.

function                          with a state dict           without a state dict
Trainer.save_model                (takes no state dict)       sharded save, file by file
PreTrainedModel.save_pretrained   written in hub layout       sharded save, called on every rank
PeftModel.save_pretrained         packed as PEFT packs it     gathered first, called on every rank
axolotl's save after training     (takes no state dict)       gathered first, called on every rank

`Accelerator.save_state` writes its own files. It leaves out quantised experts, which are frozen, as
`save_checkpoint` does, and writes their hashes instead (`checkpoints/training/base.py`). The hashes
are compared when the state is loaded.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.gather import (
    gather_adapters,
    gather_state_dict,
    gather_tensor,
)
from hf_moe_ep.checkpoints.hub.save import save_pretrained, save_state_dict
from hf_moe_ep.checkpoints.storage.unpickle import METADATA_FILE
from hf_moe_ep.checkpoints.training.base import BASE, check_base, describe_base, number_file_name
from hf_moe_ep.checkpoints.training.conversions import CONVERSIONS, make_conversions
from hf_moe_ep.checkpoints.training.extra import EXTRA, describe_extra, restore_extra
from hf_moe_ep.checkpoints.training.folder import write_json
from hf_moe_ep.checkpoints.training.tensors import list_state_tensors
from hf_moe_ep.config import get_launched_local_world_size, get_launched_world_size
from hf_moe_ep.etp import map_names_to_split_dims, restore_stock_shapes
from hf_moe_ep.integrations.prompts import save_prompts
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.moe.stacked import make_stacked_tensors, make_stock_tensors
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import (
    PATIENCE_OF_RANK_0,
    check_everyone_calls,
    is_first,
    run_on_all,
    run_on_first,
)
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, find_state, holds_quantised_experts
from hf_moe_ep.upstream.accelerate_and_trainer import call_stock_save, list_prepared_models
from hf_moe_ep.upstream.adapters import (
    canonical_modules,
    has_adapters,
    has_added_adapters,
    learns_prompts,
    saving_as,
)
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap
from hf_moe_ep.upstream.replaced import replaced
from hf_moe_ep.upstream.sharded_models import get_stock_class

_CONVERSION = "path_initial_model_for_weight_conversion"


def save_model(
    original: Callable[..., Any],
    self: transformers.Trainer,
    output_dir: str | None = None,
    _internal_call: bool = False,
) -> None:
    """Wrap `Trainer.save_model`: write hub layout, also with SHARDED_STATE_DICT.

    Only the adapters of a PeftModel are written. Two functions of the Trainer make internal calls:
    `_save_checkpoint` passes a folder, and stock code saves the model. `push_to_hub` passes no
    folder, and the model is saved in hub layout.

    Raises:
        RuntimeError: on every rank that called this: another rank did not call, or a rank failed.
    """
    state = find_state(self.model)
    if state is None:
        original(self, output_dir, _internal_call)
        return
    is_checkpoint = _internal_call and output_dir is not None
    # Such a checkpoint only refers to the files with extra tensors.
    is_sharded_checkpoint = (
        is_checkpoint and get_state_dict_type(self.accelerator) == "SHARDED_STATE_DICT"
    )
    copies_extra = not is_sharded_checkpoint and not has_adapters(unwrap(self.model))
    folder = output_dir or self.args.output_dir
    with _leave_out_lost_extra(state, folder) if copies_extra else nullcontext():
        _save_model(original, self, state, output_dir, _internal_call)


def _save_model(
    original: Callable[..., Any],
    self: transformers.Trainer,
    state: ModelState,
    output_dir: str | None,
    _internal_call: bool,
) -> None:
    is_checkpoint = _internal_call and output_dir is not None
    if state.meshes is None or not self.is_fsdp_enabled:
        original(self, output_dir, _internal_call)
        return
    if is_checkpoint:
        # With FULL_STATE_DICT rank 0 writes. If it fails, the other ranks must not wait in the next
        # collective.
        run_on_all(f"saving {output_dir}", lambda: original(self, output_dir, _internal_call))
        return
    check_everyone_calls("save_model of the Trainer", patience_of_rank_0=PATIENCE_OF_RANK_0)
    folder = output_dir or self.args.output_dir
    if has_adapters(unwrap(self.model)):
        state_dict = gather_adapters(self.model)
    else:
        state_dict = _SavedAlready()
        save_pretrained(self.model, folder)

    def save_other_files() -> None:
        if self.args.should_save:
            call_stock_save(self, folder, state_dict)

    run_on_all(f"saving {folder}", save_other_files)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


@contextmanager
def _leave_out_lost_extra(state: ModelState, folder: str) -> Iterator[None]:
    """Let saves in the block leave out the extra tensors of a model if these cannot be copied.

    The model's class ignores extra tensors, and rank 0 copies them. Here it gives a warning instead
    of an error: the trained weights must be saved in any case, and a user of the Trainer cannot
    pass `extra_tensors=False`.
    """
    extra = state.extra
    if extra is None or not is_first():
        yield
        return
    try:
        extra.check_unchanged()
    except (ValueError, OSError) as error:
        warnings.warn(
            f"{folder} is saved without the tensors of {extra.source} that the model's class "
            f"ignores: {error}",
            stacklevel=2,
        )
        state.extra = None
    try:
        yield
    finally:
        state.extra = state.extra or extra


@contextmanager
def share_write_errors(module: ModuleType) -> Iterator[None]:
    """Make all ranks raise in the block if one rank fails to write.

    `module` saves models and optimizers with two functions of Accelerate. With FULL_STATE_DICT each
    of these functions begins with a collective and ends with a write of rank 0. If the write of the
    first function failed, the other ranks would wait for rank 0 in the collective of the second.
    """
    with ExitStack() as stack:
        for name in ("save_fsdp_model", "save_fsdp_optimizer"):
            function = partial(_call_on_all, f"{name} of Accelerate", getattr(module, name))
            stack.enter_context(replaced(module, name, function))
        yield


def _call_on_all(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run_on_all(what, partial(function, *args, **kwargs))


def check_saves_once(args: transformers.TrainingArguments) -> None:
    """Raise ValueError if a Trainer would save on each of several nodes.

    Only rank 0 gets the gathered tensors, so files of the other nodes would lack them.
    """
    ranks_per_node, world = get_launched_local_world_size(), get_launched_world_size()
    if args.save_on_each_node and ranks_per_node is not None and ranks_per_node < world:
        raise ValueError(
            f"save_on_each_node=True on {-(-world // ranks_per_node)} nodes ({world} ranks, "
            f"{ranks_per_node} per node), but all ranks save a patched model together, once; set "
            f"save_on_each_node=False, and let output_dir be a folder that all nodes share"
        )


class _SavedAlready(dict[str, Tensor]):
    """An empty state dict with which `Trainer._save` saves everything except the model."""


def save_in_hub_layout(
    original: Callable[..., Any],
    self: transformers.PreTrainedModel,
    save_directory: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `PreTrainedModel.save_pretrained`: save a sharded model in hub layout.

    If a gathered state dict is given, rank 0 writes the state dict. Without a state dict every rank
    must call this, as Accelerate's examples do. `is_main_process` and `save_function` are then
    ignored. Adapters of the model's `add_adapter` are gathered and saved as those of a PeftModel.

    A model that is not sharded is saved in the same way in two cases: if its checkpoint had tensors
    that its class ignores, which stock would lose, and if a head for multi-token prediction is
    trained, because the head has other keys in checkpoints. `extra_tensors=False` leaves out the
    tensors that the class ignores.

    Raises:
        ValueError: an option is given that such a save would ignore.
        RuntimeError: no state dict is given, and only rank 0 calls this.
    """
    state = find_state(self)
    extra_tensors = kwargs.pop("extra_tensors", True)
    if state is None:
        original(self, save_directory, *args, **kwargs)
        return
    if has_adapters(self):
        options = _name_options(original, self, save_directory, *args, **kwargs)
        state_dict = options.pop("state_dict", None)
        if state.meshes is not None and state_dict is None and has_added_adapters(self):
            _check_options(options)
            check_everyone_calls(
                "save_pretrained of the model", patience_of_rank_0=PATIENCE_OF_RANK_0
            )
            save_pretrained(self, save_directory, **options)
            return
        with _adapters_of_stages(state, state_dict):
            original(self, save_directory, *args, **kwargs)
        return
    copies_extra = extra_tensors and state.extra is not None
    needs_ours = copies_extra or state.config.mtp_layers > 0
    if state.meshes is None and not needs_ours:
        original(self, save_directory, *args, **kwargs)
        return
    options = _name_options(original, self, save_directory, *args, **kwargs)
    state_dict = options.get("state_dict")
    size = {name: options[name] for name in ("max_shard_size",) if name in options}
    size["extra_tensors"] = extra_tensors
    if state.meshes is None:
        if options.get("is_main_process", True):
            _check_options(options)
            stacked = _make_stacked_state_dict(self, state_dict)
            save_state_dict(self, save_directory, stacked, **size)
    elif state_dict is None:
        _check_options(options)
        check_everyone_calls("save_pretrained of the model", patience_of_rank_0=PATIENCE_OF_RANK_0)
        save_pretrained(self, save_directory, **size)
    elif options.get("push_to_hub") and not needs_ours:
        original(self, save_directory, *args, **kwargs)
    elif not isinstance(state_dict, _SavedAlready):
        _check_options(options)  # on every rank, because other ranks may wait for rank 0
        if options.get("is_main_process", True):
            stacked = _make_stacked_state_dict(self, state_dict)
            save_state_dict(self, save_directory, stacked, **size)


def _name_options(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a stock `save_pretrained` by name, without the model and the folder.

    The result includes the arguments in the function's `**kwargs`.
    """
    options = dict(signature(original).bind(*args, **kwargs).arguments)
    options |= options.pop("kwargs", {})
    # A subclass may have a method that takes *args instead.
    return {name: x for name, x in options.items() if name not in ("self", "save_directory")}


def _make_stacked_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return a state dict with stacked weights of experts.

    A given `state_dict` has stock parameters, as `Accelerator.get_state_dict` returns them, and is
    converted; it may have stacked weights already whose names no stock parameter has. Without one
    the model is not sharded, and `state_dict(keep_vars=True)` returns the model's stacked weights.
    """
    if state_dict is not None:
        by_name = {get_canonical_name(name): tensor for name, tensor in state_dict.items()}
        return make_stacked_tensors(model, by_name)
    own = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in own.items()}


def _check_options(options: dict[str, Any]) -> None:
    """Raise ValueError if an option of `save_pretrained` is given that our save would ignore."""
    remedies = {
        "push_to_hub": "save, then upload_folder of huggingface_hub on rank 0",
        "variant": "save, then rename the files on rank 0",
        "distributed_checkpoint": "leave it out: the folder can be loaded at any world size",
    }
    unsupported = [name for name in remedies if options.get(name)]
    if options.get("save_original_format") is False:
        unsupported.append("save_original_format")
        remedies["save_original_format"] = (
            "leave it out: a sharded model is always saved in the layout of its hub checkpoint"
        )
    if unsupported:
        name = unsupported[0]
        raise ValueError(
            f"save_pretrained of a sharded model does not take {name}={options[name]!r}; "
            f"{remedies[name]}"
        )


def save_adapters(
    original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap `PeftModel.save_pretrained`: gather the adapters of a sharded model, pack as PEFT does.

    If a state dict is given, the adapters in it are packed. Otherwise every rank must call this.

    Raises:
        ValueError: the option that converts PiSSA and similar adapters to plain LoRA is given.
        RuntimeError: no state dict is given, and only rank 0 calls this.
    """
    state = find_state(self)
    if state is None or state.meshes is None:
        original(self, save_directory, *args, **kwargs)
        return
    options = _name_options(original, self, save_directory, *args, **kwargs)
    _refuse_conversion(options.get(_CONVERSION))
    # Without FSDP the Trainer passes state_dict=None.
    state_dict = options.pop("state_dict", None)
    if state_dict is None:
        check_everyone_calls("save_pretrained of the model", patience_of_rank_0=PATIENCE_OF_RANK_0)
        save_pretrained(self, save_directory, **options)
        return
    packed = pack_factors(self, state_dict)
    save = partial(original, self, save_directory, state_dict=packed, **options)
    if learns_prompts(self):
        if options.get("is_main_process", True):
            save_prompts(self, state_dict, save)
        return
    with canonical_modules(self), _adapters_of_stages(state, packed):
        save()


def _refuse_conversion(initial: str | None) -> None:
    """Raise ValueError if PEFT would load the initial adapter, to subtract it from the trained one.

    PEFT hides the error of `load_adapter` by another error (peft/tuners/lora/model.py).
    """
    if initial is not None:
        raise ValueError(
            f"{_CONVERSION}={initial!r} loads a second adapter, but a sharded model cannot load "
            f"adapters; save the adapter without this option, then use the option in one process: "
            f"PeftModel.from_pretrained(base, directory).save_pretrained(...)"
        )


def _adapters_of_stages(
    state: ModelState, state_dict: Mapping[str, Tensor] | None
) -> AbstractContextManager[None]:
    """Let PEFT save the adapters of all pipeline stages, in the block, from a gathered state dict.

    Raises:
        ValueError: `state_dict` was not gathered from all stages.
    """
    if state.stage is None:
        return nullcontext()
    by_adapter: dict[str, dict[str, str]] = state.stage.keys_of_adapters
    names = {name for keys in by_adapter.values() for name in keys.values()}
    if not state_dict and not is_first():
        return saving_as(defaultdict(dict))
    if not names or not state_dict or not names <= state_dict.keys():
        raise ValueError(
            f"the adapters of a model with pp_size={state.stage.size} are on the ranks of several "
            f"stages, and rank 0 has those of one; call hf_moe_ep.save_pretrained(model, folder) "
            f"on every rank, or pass state_dict=accelerator.get_state_dict(model), which every "
            f"rank has called"
        )
    return saving_as(
        {
            adapter: {key: state_dict[name] for key, name in keys.items()}
            for adapter, keys in by_adapter.items()
        }
    )


def save_gathered_adapter(original: Callable[..., Any], model: nn.Module, output_dir: str) -> bool:
    """Wrap axolotl's `save_fsdp2_lora_adapter`: pack the adapters of experts as PEFT does.

    axolotl calls this function after training, to gather and save an adapter. Returns True if the
    model has an adapter, which is then saved.
    """
    state = find_state(model)
    if state is None or state.meshes is None or not has_adapters(model):
        return bool(original(model, output_dir))
    save_pretrained(model, output_dir)
    return True


def get_base_model_class(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> type:
    """Wrap `PeftModel._get_base_model_class`: return the stock class, not FSDP2's subclass."""
    return get_stock_class(original(self, *args, **kwargs))


def get_state_dict(
    original: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Accelerator.get_state_dict`: return stock parameters, and adapters as PEFT packs them.

    With pipeline stages rank 0 gets the tensors of all stages, and the other ranks get none.
    """
    state = find_state(model)
    if state is not None and state.stage is not None:
        return gather_state_dict(model)
    with experts_in_hub_order(model):
        state_dict = original(self, model, *args, **kwargs)
    if state is None:
        return state_dict
    packed = pack_factors(model, restore_stock_shapes(model, state_dict))
    return packed if state.meshes is None else _make_stock_state_dict(model, packed)


def _make_stock_state_dict(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace stacked weights of experts by the stock parameters, which share no memory.

    If tensors share memory, `Accelerator.save_model` saves only the first of them.
    """
    tensors = make_stock_tensors(model, state_dict)
    for name in tensors.keys() - state_dict.keys():
        if tensors[name].nbytes < tensors[name].untyped_storage().nbytes():
            tensors[name] = tensors[name].clone()
    return tensors


def get_state_dict_type(accelerator: Accelerator) -> str:
    """Return the type of state dict that Accelerate saves, or "" without FSDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return getattr(getattr(plugin, "state_dict_type", None), "name", "")


def check_state_dict_type(accelerator: Accelerator) -> None:
    """Raise ValueError if Accelerate's checkpoint would not contain the whole state of the models.

    With SHARDED_STATE_DICT the checkpoint contains everything. With any other type rank 0 gathers
    only the tensors of its own pipeline stage, and it saves the optimizer's state in the shapes
    that parameters have with this etp_size.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    kind = get_state_dict_type(accelerator)
    for model in list_prepared_models(accelerator):
        state = find_state(model)
        if state is None or kind == "SHARDED_STATE_DICT":
            continue
        if state.stage is not None and plugin is not None:
            raise ValueError(
                f"fsdp_state_dict_type: {kind} saves what rank 0 can gather, which is one of the "
                f"{state.stage.size} pipeline stages; write fsdp_state_dict_type: "
                f"SHARDED_STATE_DICT (trainer.save_model and save_pretrained write the whole model)"
            )
        if split_dims := map_names_to_split_dims(model):
            raise ValueError(
                f"fsdp_state_dict_type {kind} saves optimizer states in the shapes of this layout, "
                f"and with etp_size > 1 gate and up are separate dims of a parameter "
                f"({next(iter(split_dims))}); set fsdp_state_dict_type: SHARDED_STATE_DICT"
            )


def check_saved_with_same_type(accelerator: Accelerator, folder: Path) -> None:
    """Raise ValueError if a checkpoint has other files than Accelerate would read.

    Each type of state dict has its own files, and so has a run without FSDP. Stock fails with an
    error about a missing file, which does not say why it is missing.
    """
    saved, kind = _find_saved_type(folder), get_state_dict_type(accelerator)
    if saved == kind:
        return
    if saved and kind:
        raise ValueError(
            f"{folder} was saved with fsdp_state_dict_type: {saved}, but a run with {kind} reads "
            f"other files; set fsdp_state_dict_type: {saved}"
        )
    this_run, saved_run = ("without", "with") if saved else ("with", "without")
    raise ValueError(
        f"{folder} was saved by a run {saved_run} FSDP, but a run {this_run} FSDP reads other "
        f"files; resume {saved_run} FSDP, or start a new run from the saved weights"
    )


def _find_saved_type(folder: Path) -> str:
    """Return the type of state dict in a checkpoint of Accelerate, or "" if it is not of FSDP."""
    for path in folder.glob(f"{FSDP_MODEL_NAME}_*"):
        # Accelerate 1.15 can write one file per rank instead of a folder of DCP. A second model
        # of FULL_STATE_DICT has the file pytorch_model_fsdp_1.bin.
        if (path / METADATA_FILE).is_file() or "_rank" in path.name:
            return "SHARDED_STATE_DICT"
    return "FULL_STATE_DICT" if (folder / f"{FSDP_MODEL_NAME}.bin").is_file() else ""


def get_model_state_dict(
    original: Callable[..., Any],
    model: nn.Module,
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    """Wrap Accelerate's `_get_model_state_dict`: leave quantised experts out of state dicts."""
    if adapter_only or sd_options is None or not holds_quantised_experts(model):
        return original(model, adapter_only=adapter_only, sd_options=sd_options)
    reshard(model)
    sharded_options = replace(
        sd_options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False
    )
    state_dict = original(model, sd_options=sharded_options)
    saved = {name: state_dict[name] for name in list_state_tensors(model)}
    return _gather_tensors(saved, sd_options) if sd_options.full_state_dict else saved


def _gather_tensors(state_dict: dict[str, Tensor], sd_options: Any) -> dict[str, Tensor]:
    """Gather one tensor at a time. With `cpu_offload` only rank 0 keeps them, in host memory."""
    on_host = sd_options.cpu_offload
    whole: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        gathered = gather_tensor(tensor.detach())
        if is_first() or not on_host:
            whole[name] = gathered.cpu() if on_host else gathered
    return whole


def set_model_state_dict(
    original: Callable[..., Any],
    model: nn.Module,
    state_dict: dict[str, Any],
    adapter_only: bool = False,
    sd_options: Any = None,
) -> Any:
    """Wrap Accelerate's `_set_model_state_dict`: load state dicts without quantised experts.

    Raises:
        ValueError: the state dict has other tensors than `get_model_state_dict` saves.
    """
    if find_state(model) is not None:
        # torch slices a full state dict to the current shapes of the parameters
        # (torch/distributed/checkpoint/state_dict.py). After a forward, some are still gathered.
        reshard(model)
        if not adapter_only and sd_options is not None and holds_quantised_experts(model):
            run_on_first("loading a model", partial(_check_complete, model, state_dict))
            sd_options = replace(sd_options, strict=False)
    return original(model, state_dict, adapter_only=adapter_only, sd_options=sd_options)


def _check_complete(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if a state dict has other tensors than `get_model_state_dict` saves."""
    names = list_state_tensors(model).keys()
    for missing, subject in (
        (names - state_dict.keys(), "a checkpoint lacks"),
        (state_dict.keys() - names, "the model lacks"),
    ):
        if missing:
            raise ValueError(
                f"{subject} {len(missing)} tensors, {min(missing)} among them; load a state that "
                f"save_state wrote for this model with the same experts_dtype and adapters"
            )


def write_bases(models: Iterable[nn.Module], folder: Path) -> None:
    """Write the hashes of each model's quantised experts to the folder of Accelerate's state."""
    for index, model in enumerate(models):
        if _is_sharded(model):
            reshard(model)
            base = describe_base(model)
            path = folder / number_file_name(BASE, index)
            if base is not None:
                run_on_first(f"saving {path}", partial(write_json, path, base))


def check_bases(models: Iterable[nn.Module], folder: Path) -> None:
    """Raise ValueError on every rank if the adapters in a folder belong to another base model."""
    for index, model in enumerate(models):
        if _is_sharded(model):
            reshard(model)
            check_base(folder, model, index)


def write_extra_and_conversions(models: Iterable[nn.Module], folder: Path) -> None:
    """Write for `hf-moe-ep convert` what each model's loaded checkpoint was like.

    The files have the locations of extra tensors, and the layout of the loaded checkpoint.
    """

    def write() -> None:
        for index, model in enumerate(models):
            state = find_state(model)
            if state is None:
                continue
            described = {EXTRA: describe_extra(state), CONVERSIONS: make_conversions(model)}
            for name, content in described.items():
                path = folder / number_file_name(name, index)
                if content is not None:
                    write_json(path, content)
                else:  # an earlier run may have written to this folder
                    path.unlink(missing_ok=True)

    run_on_first(f"saving {folder}", write)


def restore_all_extra(models: Iterable[nn.Module], folder: Path) -> None:
    """Restore each model's references to extra tensors from the checkpoint in a folder."""

    def restore() -> None:
        for index, model in enumerate(models):
            state = find_state(model)
            if state is not None:
                restore_extra(state, folder / number_file_name(EXTRA, index))

    run_on_first(f"reading {folder}", restore)


def _is_sharded(model: nn.Module) -> bool:
    state = find_state(model)
    return state is not None and state.meshes is not None
