"""Use private names of Accelerate, the Trainer and TRL for the wrappers of `integrations/`.

The names come from accelerate/state.py, accelerate/accelerator.py, transformers/trainer.py and
trl/trainer/.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor

from hf_moe_ep.config import is_launched_with_fsdp, read_launch_environment
from hf_moe_ep.upstream.replaced import replaced
from hf_moe_ep.upstream.replaced_forwards import iterate_forward_functions
from hf_moe_ep.upstream.wrap import find_owner


def accelerate_is_in_use() -> bool:
    """Return True if there is a sign that this process uses an Accelerator.

    The signs are: `accelerate launch` started the process; an Accelerator or TrainingArguments
    exist; a module or a running function outside of Hugging Face's packages and ours has a variable
    that is the package accelerate or the class Accelerator. The import of accelerate alone is not
    a sign, because transformers imports accelerate.
    """
    launched = is_launched_with_fsdp() or "ACCELERATE_MIXED_PRECISION" in read_launch_environment()
    if launched or PartialState._shared_state:
        return True
    if "Accelerator" not in vars(accelerate):
        return False  # `call_when_accelerator_is_imported` waits for the first use.
    namespaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _PACKAGES_WITH_ACCELERATOR and hasattr(module, "__dict__")
    ]
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _PACKAGES_WITH_ACCELERATOR:
            namespaces.append(frame.f_locals)
        frame = frame.f_back
    # Identities, because `==` of tensors is not a bool. There are about 150,000 variables.
    wanted = {id(accelerate), id(Accelerator)}
    return any(not wanted.isdisjoint(map(id, list(names.values()))) for names in namespaces)


# Packages that import the Accelerator class whether or not a script uses it.
_PACKAGES_WITH_ACCELERATOR = ("accelerate", "transformers", "peft", "hf_moe_ep")


def call_when_accelerator_is_imported(call: Callable[[], None]) -> None:
    """Call `call` the next time that the class Accelerator is imported, or read from a module.

    Until then `accelerate` and `accelerate.accelerator` have no attribute `Accelerator`. The first
    use of the name in one of the two modules therefore calls the module's `__getattr__` (PEP 562),
    which restores the class in both modules and calls `call`. `from accelerate import *` reads each
    name in `__all__`, so a module without `__all__` gets one.
    """
    modules = (accelerate, accelerate.accelerator)
    stock_names = [dict(vars(module)) for module in modules]
    if any("Accelerator" not in names for names in stock_names):
        return

    def restore() -> None:
        for module, names in zip(modules, stock_names, strict=True):
            for name in ("Accelerator", "__getattr__", "__all__"):
                vars(module).pop(name, None)
                if name in names:
                    vars(module)[name] = names[name]

    def look_up(names: dict[str, Any], name: str) -> Any:
        if name == "Accelerator":
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller != find_owner.__module__:  # `report_wraps()` only looks the class up
                restore()
                call()
            return names[name]
        if "__getattr__" in names:
            return names["__getattr__"](name)
        raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")

    for module, names in zip(modules, stock_names, strict=True):
        del vars(module)["Accelerator"]
        vars(module)["__getattr__"] = partial(look_up, names)
        vars(module).setdefault("__all__", [name for name in names if not name.startswith("_")])


def end_wait_for_accelerator() -> None:
    """End the wait of `call_when_accelerator_is_imported`, if there is one.

    This restores the class in both modules and calls the waiting function, as a first use does.
    """
    _ = accelerate.Accelerator


def count_as_shards(parallelism: Any, names: Iterable[str]) -> None:
    """Multiply dp_shard_size of a ParallelismConfig by its sizes `names`, and set `names` to 1.

    For example, dp_shard_size 2 and cp_size 4 become 8 and 1. The function changes the fields, and
    also `_sizes`, which the config's mesh reads (accelerate/parallelism_config.py).
    """
    for name in names:
        parallelism.dp_shard_size *= getattr(parallelism, name)
        setattr(parallelism, name, 1)
        parallelism._sizes[name.removesuffix("_size")] = 1
    parallelism._sizes["dp_shard"] = parallelism.dp_shard_size


def declare_fsdp(state: AcceleratorState) -> None:
    """Set FSDP as the distributed type of all Accelerators in this process."""
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def list_prepared_loaders(accelerator: Accelerator) -> list[Any]:
    """Return the data loaders that `accelerator` prepared (accelerate/accelerator.py)."""
    return accelerator._dataloaders


def list_prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """Return the models that `accelerator` prepared (accelerate/accelerator.py)."""
    return accelerator._models


def list_prepared_optimizers(accelerator: Accelerator) -> list[AcceleratedOptimizer]:
    """Return the optimizers that `accelerator` prepared (accelerate/accelerator.py)."""
    return accelerator._optimizers


def list_prepared_schedulers(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """Return the schedulers that `accelerator` prepared (accelerate/accelerator.py)."""
    return accelerator._schedulers


def has_checkpointed_modules(model: nn.Module) -> bool:
    """Return True if Accelerate's activation checkpointing has wrapped a module of a model.

    The wrapper is torch's (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py).
    """
    return any(isinstance(module, CheckpointWrapper) for module in model.modules())


@contextmanager
def distinct_data_ptrs(models: Iterable[nn.Module]) -> Iterator[None]:
    """Give parameters without memory different negative `data_ptr`s inside the block.

    `Accelerator.prepare` finds the sharded parameters of an optimizer by the addresses that the
    parameters had before (accelerate/accelerator.py). All tensors on meta, and all empty shards,
    have the address 0.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    parts = [p._local_tensor if isinstance(p, DTensor) else p for p in parameters]
    without_memory = [part for part in parts if part.is_meta or part.numel() == 0]
    for number, part in enumerate(without_memory, start=1):
        setattr(part, "data_ptr", partial(int, -number))  # noqa: B010  mypy: a method
    # While Accelerate shards a model, it frees each parameter that nothing else refers to.
    del parameters, parts
    try:
        yield
    finally:
        for part in without_memory:
            vars(part).pop("data_ptr", None)


def clips_over_meshes(accelerator: Accelerator) -> bool:
    """Return True if Accelerate itself clips gradients on several device meshes.

    Accelerate has done this since 1.15 (accelerate/accelerator.py). Earlier versions call torch's
    function, which raises an error for two meshes.
    """
    return hasattr(accelerator, "_clip_grad_norm_dtensor_aware")


def has_chunked_loss(model: nn.Module) -> bool:
    """Return True if TRL replaced the forward of `model` by the forward of TRL's chunked loss.

    The chunked loss is the default of SFTTrainer before TRL 1.15 (trl/trainer/sft_trainer.py). The
    new forward imports stock's function for the router's aux loss.
    """
    names = {getattr(forward, "__name__", "") for forward in iterate_forward_functions(model)}
    return "_chunked_ce_forward" in names


def refresh_gather_function(trainer: transformers.Trainer) -> None:
    """Make a Trainer call the current `gather_for_metrics` of its Accelerator.

    The Trainer stored the method in an attribute before `specialise` changed the class of the
    Accelerator (transformers/trainer.py).
    """
    stored = getattr(trainer, "gather_function", None)
    function = stored.func if isinstance(stored, partial) else stored
    if getattr(function, "__name__", "") == "gather_for_metrics":
        options = stored.keywords if isinstance(stored, partial) else {}
        trainer.gather_function = partial(trainer.accelerator.gather_for_metrics, **options)


def has_logged_this_step(trainer: transformers.Trainer) -> bool:
    """Return True from the moment when a Trainer logs the loss of the current step by itself.

    The Trainer stores the step before it calls `log`, on all ranks (`_maybe_log_save_evaluate` in
    transformers/trainer.py). ms-swift does the same, but resets `control.should_log` before the
    call (swift/trainers/mixin.py).
    """
    return getattr(trainer, "_globalstep_last_logged", None) == trainer.state.global_step


def generates_in_training(trainer: transformers.Trainer) -> bool:
    """Return True if each process of this trainer generates its own training samples.

    This is true for the trainers for GRPO, RLOO and distillation, and their subclasses
    (trl/trainer/).
    """
    return hasattr(trainer, "_generate_and_score_completions")


def find_model_logger(trainer: transformers.Trainer) -> str | None:
    """Return the variable that makes a callback save the model after training, on rank 0 alone.

    The callback creates a second Trainer and calls its `save_model` (`on_train_end` of two classes
    in transformers/integrations/integration_utils.py).
    """
    from transformers.integrations import DVCLiveCallback, WandbCallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._log_model.is_enabled:
            return "WANDB_LOG_MODEL"
        if isinstance(callback, DVCLiveCallback) and callback._log_model is True:
            return "HF_DVCLIVE_LOG_MODEL"
    return None


@contextmanager
def one_group_for_all_meshes() -> Iterator[None]:
    """Let a Trainer put parameters of several device meshes into one group inside the block.

    Otherwise newer versions of `Trainer.create_optimizer` divide each group by device meshes
    (transformers/trainer.py).
    """
    module: Any = transformers.trainer
    if not hasattr(module, "has_mixed_dtensor"):
        yield
        return
    with replaced(module, "has_mixed_dtensor", lambda tensors: False):
        yield


# While the Trainer saves a checkpoint because of SIGTERM, the checkpoint contains this file
# (transformers/trainer_jit_checkpoint.py).
SAVE_IN_PROGRESS = "checkpoint-is-incomplete.txt"


def get_checkpoint_folder(trainer: transformers.Trainer, trial: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step (transformers/trainer.py)."""
    return Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"


def call_stock_save(trainer: transformers.Trainer, folder: str, state_dict: Any) -> None:
    """Call `Trainer._save`, which writes a model, its tokenizer and the training arguments."""
    trainer._save(folder, state_dict=state_dict)
