"""Wrap functions of Accelerate, transformers, PEFT and trainers: the table of all wrappers.

The table has one row (`Wrap`) per function. The rows form groups, which are constants below. The
first line of a wrapper's docstring says why the function is wrapped.

`import hf_moe_ep` replaces no function. `patch` sets methods of its model, such as
`save_pretrained`. From then on, the functions of a group are replaced as soon as the process uses
the group's library; the comment on the group says when. A process whose training loop uses only
PyTorch replaces no function.

Such a function is replaced for the whole process. Its wrapper first checks if it was given a
patched model. If not, it calls the stock function and does nothing else. With a patched model it
also adds our methods to the objects that are involved, for all later calls:

    object              how our methods are added
    an Accelerator      its class becomes a subclass that has ACCELERATOR_METHODS
    a Trainer           its class becomes a subclass that has TRAINER_METHODS
    other objects       bound methods are set as attributes of the trainers of TRL and ms-swift,
                        the prepared optimizers, the model, a PeftModel, its tuner and its layers

Objects that are never used with a patched model run stock code. For each function that is replaced
for the process, `docs/upstream.md` names a hook that would make the replacement unnecessary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import transformers
from accelerate import Accelerator
from torch import nn

from hf_moe_ep.compiled.attach import replace_compile
from hf_moe_ep.config import is_launched_with_fsdp
from hf_moe_ep.integrations import (
    accelerate_states,
    engines,
    features,
    new_adapters,
    optimizers,
    prepare,
    prompts,
    references,
    saving,
    shared_batches,
    single_ranks,
    trackers,
    trainer_checkpoints,
)
from hf_moe_ep.lora import computed as adapters
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.accelerate_and_trainer import (
    accelerate_is_in_use,
    call_when_accelerator_is_imported,
    end_wait_for_accelerator,
    has_logged_this_step,
    refresh_gather_function,
)
from hf_moe_ep.upstream.adapters import is_peft_model
from hf_moe_ep.upstream.wrap import (
    BoundWrapper,
    Feature,
    Wrap,
    bind_wrapper,
    call_when_imported,
    check_targets,
    find_owner,
    in_force,
    is_specialised,
    specialise,
    wrap_process,
)


def prepare_objects(
    original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Accelerator.prepare`: detect patched models, refuse launches that do not shard them.

    If a model is patched, our methods are added to the Accelerator and to the model's adapters.
    """
    for model in args:
        state = find_state(model) if isinstance(model, nn.Module) else None
        if state is None:
            continue
        # After the patch, a training framework may have replaced the function that shards
        # (axolotl/monkeypatch/accelerate/fsdp2.py).
        wrap_process(ACCELERATE)
        specialise(self, Accelerator, ACCELERATOR_METHODS)
        references.share_meshes(self, state)
        wrap_adapters(model, state)
        if state.config.experts_dtype is not None:
            wrap_process(QUANTISED)
    if not is_specialised(self):
        return original(self, *args, **kwargs)
    prepared = prepare.prepare(original, self, *args, **kwargs)
    optimizers.wrap_steps(self, OPTIMIZER_STEP)
    return prepared


def prepare_model(
    original: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Accelerator.prepare_model`: shard a teacher model, as Accelerate would not do.

    TRL calls this function for a teacher. Accelerate calls it for every model that it prepares.
    """
    if find_state(model) is None:
        return original(self, model, *args, **kwargs)
    specialise(self, Accelerator, ACCELERATOR_METHODS)
    return references.prepare_evaluated(original, self, model, *args, **kwargs)


def create_accelerator(original: Callable[..., Any], self: transformers.Trainer) -> None:
    """Wrap `create_accelerator_and_postprocess`: find patched models before TRL shards references.

    When the Trainer calls this function, it already has its model, unless `model_init` builds the
    model later. TRL's trainers prepare their reference models right after this call.
    """
    _wrap_cpu_ranks(bool(self.args.fsdp))
    earlier = getattr(self, "accelerator", None)
    original(self)
    if earlier is not None:
        references.take_over_meshes(earlier, self.accelerator)
    adopt_trainer(self, self.model)


def call_model_init(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Trainer.call_model_init`: detect a patched model that `model_init` has built."""
    model = original(self, *args, **kwargs)
    adopt_trainer(self, model)
    return model


def train(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Trainer.train`: detect late patches, and resume from complete checkpoints only.

    A patch is late if the model was patched after the Trainer was created.

    Raises:
        ValueError: with an option of the Trainer, one of several ranks would act alone, or an
            evaluation would count samples twice.
    """
    adopt_trainer(self, self.model)
    if not is_specialised(self):
        return original(self, *args, **kwargs)
    single_ranks.check_ranks_act_together(self)
    shared_batches.check_streams_of_evaluations(self)
    # If the Trainer has no model, `model_init` builds one inside the original function.
    state = None if self.model is None else find_state(self.model)
    shared_batches.correct_steps(self)
    if state is not None and state.is_reported:
        # This module is slow to import, so it is imported only for `hf-moe-ep run`.
        from hf_moe_ep.integrations.run_report import add_report

        add_report(self)
    return trainer_checkpoints.train(original, self, *args, **kwargs)


def evaluate(
    original: Callable[..., Any], self: transformers.Trainer, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `Trainer.evaluation_loop`: detect late patches, and cast a sharded model.

    A patch is late if the model was patched after the Trainer was created. A Trainer that only
    evaluates does not call `train`.
    """
    adopt_trainer(self, self.model)
    if is_specialised(self):
        prepare.cast_for_full_eval(self)
    return original(self, *args, **kwargs)


def log_expert_load(
    original: Callable[..., Any],
    self: transformers.Trainer,
    logs: dict[str, float],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `Trainer.log`: add an ExpertLoadCallback's values before any tracker runs."""
    # This module is slow to import, so it is imported at the first call.
    from hf_moe_ep.integrations.expert_load import ExpertLoadCallback

    # The logs of an evaluation have "eval_loss", and the last summary has "train_loss" instead. All
    # ranks log a step's loss. A user may call this function at other steps on one rank.
    if "loss" in logs and has_logged_this_step(self):
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExpertLoadCallback):
                logs.update(callback.values(self.model, self.state.global_step))
    original(self, logs, *args, **kwargs)


def adopt_trainer(trainer: transformers.Trainer, model: Any) -> None:
    """Add our methods to a Trainer that has a patched model, and to its Accelerator."""
    state = find_state(model) if isinstance(model, nn.Module) else None
    if state is None:
        return
    saving.check_saves_once(trainer.args)
    prepare.take_over_sizes(getattr(trainer.accelerator, "parallelism_config", None), [model])
    state = find_state(model)  # `take_over_sizes` may have patched the model again
    assert state is not None
    specialise(trainer, transformers.Trainer, TRAINER_METHODS)
    specialise(trainer.accelerator, Accelerator, ACCELERATOR_METHODS)
    wrap_process(ROTATION)
    if state.config.experts_dtype is not None:
        wrap_process(QUANTISED)
    for row in FRAMEWORK_METHODS:
        owner = getattr(sys.modules.get(row.module), row.target.split(":")[1].split(".")[0], None)
        if owner is not None and isinstance(trainer, owner) and row.name not in vars(trainer):
            setattr(trainer, row.name, bind_wrapper(trainer, row))
    refresh_gather_function(trainer)
    shared_batches.share_trainer_batches(trainer, state)
    references.remember_policy(trainer, state)


def create_adapters(
    original: Callable[..., Any],
    self: Any,
    model: nn.Module,
    peft_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `PeftModel.__init__`: detect a PeftModel of a patched model, and add our methods.

    Prompts are refused here if the model is sharded: PEFT attaches them without `inject_adapter`.
    """
    state = find_state(model)
    if state is not None:
        new_adapters.check_accepts(state, peft_config)
    original(self, model, peft_config, *args, **kwargs)
    if state is not None:
        wrap_adapters(self, state)


def inject_adapter(
    original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Wrap `BaseTuner.inject_adapter`: detect adapters, and refuse them in a sharded model.

    Our methods are added to the tuner and to the layers of the adapter.
    """
    new_adapters.inject_adapter(original, self, model, *args, **kwargs)
    state = find_state(model)
    if state is not None:
        wrap_adapters(self, state)
        wrap_adapters(model, state)


def wrap_adapters(model: nn.Module, state: ModelState) -> None:
    """Set our methods on the PeftModel, the tuner and the adapter layers in `model`."""
    if "peft.peft_model" not in sys.modules:
        return
    rows = []
    for row in ADAPTER_METHODS:
        try:
            rows.append((row, find_owner(row)[0]))
        except ImportError:
            continue  # `check_targets` warns that the target is missing.
    for module in list(model.modules()):
        for row, owner in rows:
            if isinstance(module, owner) and row.name not in vars(module):
                state.replace(module, row.name, BoundWrapper(module, row))
        if is_peft_model(module) and not state.has_replaced(module, "compile"):
            replace_compile(module, state)


def _build_rows(
    owner: str, feature: Feature, *functions: tuple[str, Callable[..., Any]]
) -> tuple[Wrap, ...]:
    """Build the rows of the table for functions of one owner.

    Args:
        owner: the module or class that has the functions, like "module" or "module:Class".
        feature: the feature that is lost if an installed version lacks one of the functions.
        functions: (name of the stock function, our wrapper). The first line of the wrapper's
            docstring says why the function is wrapped.
    """
    separator = "." if ":" in owner else ":"
    return tuple(Wrap(f"{owner}{separator}{name}", ours, feature) for name, ours in functions)


_ACCELERATOR = "accelerate.accelerator:Accelerator"
_TRAINER = "transformers.trainer:Trainer"
_PEFT_MODEL = "peft.peft_model:PeftModel"
_TUNER = "peft.tuners.tuners_utils:BaseTuner"

# The groups of the table. The comment on a group says whether functions are replaced for the whole
# process (Process), or methods are set on single objects (Object).
#
# Process: installed when the process starts to use Accelerate.
ACCELERATE = (
    # ms-swift imports this function from accelerate.utils. `wrap_process` replaces it there too.
    *_build_rows(
        "accelerate.accelerator",
        features.SHARDING,
        ("fsdp2_prepare_model", prepare.fsdp2_prepare_model),
    ),
    *_build_rows(_ACCELERATOR, features.SHARDING, ("prepare", prepare_objects)),
    *_build_rows(_ACCELERATOR, features.EVALUATED, ("prepare_model", prepare_model)),
)
# Process: installed if the launch config or TrainingArguments ask for FSDP.
CPU_RANKS = _build_rows(
    "accelerate.state:AcceleratorState",
    features.CPU_RANKS,
    ("__init__", prepare.init_accelerator_state),
)
# Process: installed for a model with quantised experts, which training does not change.
QUANTISED = _build_rows(
    "accelerate.utils.fsdp_utils",
    features.ACCELERATE_STATE,
    ("_get_model_state_dict", saving.get_model_state_dict),
    ("_set_model_state_dict", saving.set_model_state_dict),
)
# Object: an Accelerator that has prepared a patched model.
ACCELERATOR_METHODS = (
    *_build_rows(_ACCELERATOR, features.HUB_LAYOUT, ("get_state_dict", saving.get_state_dict)),
    *_build_rows(
        _ACCELERATOR,
        features.ACCELERATE_STATE,
        ("save_state", accelerate_states.save_state),
        ("load_state", accelerate_states.load_state),
    ),
    *_build_rows(
        _ACCELERATOR,
        features.SLICES,
        ("prepare_data_loader", shared_batches.prepare_data_loader),
        ("prepare_scheduler", shared_batches.prepare_scheduler),
        ("gather_for_metrics", shared_batches.gather_for_metrics),
    ),
    *_build_rows(_ACCELERATOR, features.TRACKERS, ("log", trackers.log)),
    *_build_rows(_ACCELERATOR, features.CLIP, ("clip_grad_norm_", optimizers.clip_grad_norm)),
)
# Object: an optimizer that was prepared together with a patched model.
(OPTIMIZER_STEP,) = _build_rows(
    "accelerate.optimizer:AcceleratedOptimizer", features.BIASES, ("step", optimizers.step)
)
# Process: installed when transformers.trainer is imported.
TRAINER = (
    *_build_rows(
        _TRAINER,
        features.TRAINER_SLICES,
        ("create_accelerator_and_postprocess", create_accelerator),
        ("call_model_init", call_model_init),
        ("evaluation_loop", evaluate),
    ),
    *_build_rows(_TRAINER, features.CHECKPOINTS, ("train", train)),
)
# Process: installed for the first Trainer with a patched model.
ROTATION = _build_rows(
    "transformers.trainer",
    features.CHECKPOINTS,
    ("rotate_checkpoints", trainer_checkpoints.postpone_rotation),
)
# Object: a Trainer with a patched model.
TRAINER_METHODS = (
    *_build_rows(_TRAINER, features.HUB_LAYOUT, ("save_model", saving.save_model)),
    *_build_rows(
        _TRAINER,
        features.CHECKPOINTS,
        ("_save_checkpoint", trainer_checkpoints.save_trainer_checkpoint),
        ("_push_from_checkpoint", trainer_checkpoints.postpone_push),
        ("_load_from_checkpoint", trainer_checkpoints.load_model),
        ("_load_best_model", trainer_checkpoints.load_model),
        ("_load_optimizer_and_scheduler", trainer_checkpoints.load_optimizer),
        ("_load_rng_state", trainer_checkpoints.load_random_states),
        ("create_optimizer", optimizers.create_optimizer),
    ),
    *_build_rows(
        _TRAINER,
        features.TRAINER_SLICES,
        ("get_tp_size", shared_batches.get_tp_size),
        ("_get_num_items_in_batch", shared_batches.get_num_items_in_batch),
        ("floating_point_ops", shared_batches.floating_point_ops),
        ("_track_num_input_tokens", shared_batches.track_num_input_tokens),
        ("prediction_step", shared_batches.prediction_step),
    ),
    *_build_rows(
        _TRAINER,
        features.STAGES,
        ("_clip_grad_norm", optimizers.clip_grad_norm_of_trainer),
        ("_get_grad_norm", optimizers.get_grad_norm),
    ),
    *_build_rows(_TRAINER, features.FULL_EVAL, ("_move_model_to_device", prepare.move_to_device)),
    *_build_rows(_TRAINER, features.LOGITS, ("compute_loss", shared_batches.compute_loss)),
    *_build_rows(_TRAINER, features.EXPERT_LOAD, ("log", log_expert_load)),
)
_OWN_REFERENCE = ("compute_ref_log_probs", references.shard_own_reference)
# Object: a trainer of TRL or of ms-swift with a patched model.
FRAMEWORK_METHODS = (
    *_build_rows("trl.trainer.dpo_trainer:DPOTrainer", features.EVALUATED, _OWN_REFERENCE),
    *_build_rows("trl.trainer.kto_trainer:KTOTrainer", features.EVALUATED, _OWN_REFERENCE),
    *_build_rows(
        "trl.trainer.sft_trainer:SFTTrainer",
        features.STAGES,
        ("compute_loss", shared_batches.compute_loss_of_sft),
    ),
    *_build_rows(
        "swift.trainers.mixin:DataLoaderMixin",
        features.TRAINER_SLICES,
        ("get_train_dataloader", shared_batches.get_train_dataloader),
    ),
    *_build_rows(
        "swift.trainers.seq2seq_trainer:Seq2SeqTrainer",
        features.TRAINER_SLICES,
        ("compute_loss", shared_batches.compute_loss_of_swift),
    ),
    # This trainer's `log` calls the function of transformers' class directly, not our subclass.
    *_build_rows(
        "swift.rlhf_trainers.dpo_trainer:DPOTrainer", features.EXPERT_LOAD, ("log", log_expert_load)
    ),
)
# Object: a patched model.
MODEL_METHODS = _build_rows(
    "transformers.modeling_utils:PreTrainedModel",
    features.HUB_LAYOUT,
    ("save_pretrained", saving.save_in_hub_layout),
)
# Process: installed when peft is imported.
PEFT = (
    *_build_rows(_PEFT_MODEL, features.ADAPTER_FILES, ("__init__", create_adapters)),
    *_build_rows(_TUNER, features.ADAPTER_REFUSALS, ("inject_adapter", inject_adapter)),
)
# Object: a PeftModel, a tuner or an adapter layer of a patched model.
ADAPTER_METHODS = (
    *_build_rows(
        _PEFT_MODEL,
        features.ADAPTER_FILES,
        ("save_pretrained", saving.save_adapters),
        ("_get_base_model_class", saving.get_base_model_class),
    ),
    *_build_rows(
        _PEFT_MODEL,
        features.PROMPTS,
        ("get_prompt_embedding_to_save", prompts.compute_prompt_to_save),
        ("get_prompt", prompts.compute_prompt),
    ),
    *_build_rows(
        _PEFT_MODEL,
        features.ADAPTER_REFUSALS,
        ("load_adapter", adapters.load_adapter),
        ("add_adapter", new_adapters.add_adapter),
    ),
    *_build_rows(
        _PEFT_MODEL,
        features.ADAPTERS,
        ("get_layer_status", adapters.get_status),
        ("get_model_status", adapters.get_status),
    ),
    *_build_rows(
        "peft.tuners.lora.layer:ParamWrapper",
        features.ADAPTERS_ON_EXPERTS,
        ("_activate_lora", adapters.activate),
    ),
    *_build_rows(_TUNER, features.ADAPTERS, ("forward", adapters.call_base_model)),
    *_build_rows(
        _TUNER,
        features.ADAPTER_REFUSALS,
        *(
            (name, partial(adapters.merge, name))
            for name in ("merge_and_unload", "unload", "merge_adapter")
        ),
    ),
)


def _build_async_rows(module: str, trainer: str) -> tuple[Wrap, ...]:
    """Build the rows of a trainer of TRL that sends weights to a server while it generates."""
    return (
        *_build_rows(module, features.ENGINES, ("_iter_vllm_named_params", engines.list_params)),
        *_build_rows(
            f"{module}:{trainer}", features.ENGINES, ("_sync_weight_merged", engines.sync_merged)
        ),
    )


_ASYNC_TRAINERS = (
    ("trl.experimental.async_grpo.async_grpo_trainer", "AsyncGRPOTrainer"),
    ("trl.experimental.async_distillation.async_distillation_trainer", "AsyncDistillationTrainer"),
)
# Process: each row is installed when its module is imported.
TRL = (
    *_build_rows(
        "trl.models.utils", features.EVALUATED, ("prepare_fsdp", references.shard_reference)
    ),
    *_build_rows("trl.trainer.utils", features.EVALUATED, ("hash_module", references.hash_weights)),
    *_build_rows(
        "trl.trainer.callbacks:SyncRefModelCallback",
        features.EVALUATED,
        ("_sync_target_model", references.mix_shards),
    ),
    *_build_rows(
        "trl.generation.vllm_generation:VLLMGeneration",
        features.ENGINES,
        ("_iter_named_params", engines.iter_named_params),
        ("sync_weights", engines.sync_weights),
    ),
    *(row for module, trainer in _ASYNC_TRAINERS for row in _build_async_rows(module, trainer)),
    *_build_rows(
        "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer",
        features.ENGINES,
        ("_move_model_to_vllm", engines.move_model),
    ),
)

# Process: installed when its module is imported.
AXOLOTL = _build_rows(
    "axolotl.integrations.expert_parallel.shard",
    features.ADAPTER_FILES,
    ("save_fsdp2_lora_adapter", saving.save_gathered_adapter),
)

SLOW_TO_IMPORT = ("trl", "swift", "axolotl")
# PROCESS: rows whose targets are replaced for the process. OBJECTS: rows set on single objects.
PROCESS = (*ACCELERATE, *CPU_RANKS, *QUANTISED, *TRAINER, *ROTATION, *PEFT, *TRL, *AXOLOTL)
OBJECTS = (
    *ACCELERATOR_METHODS,
    OPTIMIZER_STEP,
    *TRAINER_METHODS,
    *FRAMEWORK_METHODS,
    *MODEL_METHODS,
    *ADAPTER_METHODS,
)


def install(model: nn.Module, state: ModelState) -> None:
    """Set our methods on a patched model, and install each group when its library is used.

    A warning names each target that an installed version lacks (`features.py`).
    """
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            for row in MODEL_METHODS:
                if row.name not in vars(module):
                    state.replace(module, row.name, BoundWrapper(module, row))
    wrap_adapters(model, state)
    if ACCELERATE[0].target in in_force() or accelerate_is_in_use():
        wrap_accelerate()
    else:
        call_when_accelerator_is_imported(wrap_accelerate)
    call_when_imported("transformers.trainer", _wrap_trainer)
    call_when_imported("peft.peft_model", _wrap_peft)
    frameworks = (*TRL, *AXOLOTL)
    for module_name in {row.module for row in frameworks}:
        rows = [row for row in frameworks if row.module == module_name]
        call_when_imported(module_name, partial(wrap_process, rows))


def wrap_accelerate() -> None:
    """Install the wrappers that detect when an Accelerator prepares a patched model."""
    end_wait_for_accelerator()
    wrap_process(ACCELERATE)
    check_targets((*ACCELERATOR_METHODS, OPTIMIZER_STEP, *QUANTISED))
    _wrap_cpu_ranks()


def _wrap_cpu_ranks(by_arguments: bool = False) -> None:
    """Let FSDP2 run on CPU ranks if the launch or TrainingArguments ask for FSDP."""
    if is_launched_with_fsdp() or by_arguments:
        wrap_process(CPU_RANKS)


def _wrap_trainer() -> None:
    wrap_accelerate()
    wrap_process(TRAINER)
    check_targets((*TRAINER_METHODS, *ROTATION))


def _wrap_peft() -> None:
    wrap_process(PEFT)
    check_targets(ADAPTER_METHODS)


class WrapReport(NamedTuple):
    """The result of looking up one row of the table in the installed versions.

    If `resolved` is False and `error` is empty, the package is not installed and is not needed.

    Attributes:
        target: the stock function, like "module:Class.function".
        why: why the function is wrapped, from the docstring of the wrapper.
        feature: the feature that needs the wrapper.
        resolved: True if the installed version has the target.
        raises: True if a call that uses the feature raises when the target is missing.
        error: the reason why the target was not found, or "".
        process: True if the target is replaced for the process, False if methods are set on
            single objects.
        in_force: True if the target is replaced for this process now.
    """

    target: str
    why: str
    feature: str
    resolved: bool
    raises: bool
    error: str
    process: bool
    in_force: bool


def report_wraps() -> list[WrapReport]:
    """Look up every target of the table in the installed versions, without replacing any.

    The rows of training frameworks are left out, because these packages are slow to import.
    """
    reports = []
    replaced = in_force()
    for row in (*PROCESS, *OBJECTS):
        if row.package in SLOW_TO_IMPORT:
            continue
        error = ""
        if row.is_installed:
            try:
                find_owner(row)
            except ImportError as missing:
                error = str(missing)
        reports.append(
            WrapReport(
                target=row.target,
                why=row.why,
                feature=row.feature.name,
                resolved=row.is_installed and not error,
                raises=bool(row.feature.used_by),
                error=error,
                process=row in PROCESS,
                in_force=row.target in replaced,
            )
        )
    return reports
