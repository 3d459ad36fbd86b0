"""Private names of Accelerate, the Trainer and TRL that the wrappers of `integrations/` use.

accelerate/state.py, accelerate/accelerator.py, transformers/trainer.py, trl/trainer/.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from hf_moe_ep.config import launch_environment, launched_with_fsdp
from hf_moe_ep.upstream.replaced_forwards import forward_functions


def accelerate_is_in_use() -> bool:
    """Return True if there is a sign that this process uses an Accelerator.

    "accelerate is imported" is no sign, as transformers imports it. The signs are: `accelerate
    launch` started the process; an Accelerator or TrainingArguments exist; the Accelerator class
    is known to a module outside of Hugging Face's packages and ours, or to a running function.
    """
    launched = launched_with_fsdp() or "ACCELERATE_MIXED_PRECISION" in launch_environment()
    if launched or PartialState._shared_state:
        return True
    if "Accelerator" not in vars(accelerate):
        return False  # `call_when_accelerator_is_imported` waits for the first use.
    namespaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _OWN_USERS and hasattr(module, "__dict__")
    ]
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _OWN_USERS:
            namespaces.append(frame.f_locals)
        frame = frame.f_back
    known = (accelerate, Accelerator)
    return any(
        any(value is one for one in known)
        for namespace in namespaces
        for value in list(namespace.values())
    )


# Packages that know the Accelerator class whether or not a script uses it.
_OWN_USERS = ("accelerate", "transformers", "peft", "hf_moe_ep")


def call_when_accelerator_is_imported(call: Callable[[], None]) -> None:
    """Call `call` at the next `from accelerate import Accelerator` or `accelerate.Accelerator`.

    Until then the class is removed from the names of the package. The first use calls the module's
    `__getattr__` (PEP 562), which restores the class.
    """
    names = vars(accelerate)
    kind, before = names.pop("Accelerator", None), names.get("__getattr__")
    if kind is None:
        return

    def look_up(name: str) -> Any:
        if name == "Accelerator":
            names["Accelerator"] = kind
            names.pop("__getattr__")
            if before is not None:
                names["__getattr__"] = before
            call()
            return kind
        if before is not None:
            return before(name)
        raise AttributeError(f"module 'accelerate' has no attribute {name!r}")

    names["__getattr__"] = look_up


def declare_fsdp(state: AcceleratorState) -> None:
    """Set FSDP as the distributed type, for every Accelerator of this process.

    accelerate/state.py.
    """
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def prepared_loaders(accelerator: Accelerator) -> list[Any]:
    """Return the data loaders that `accelerator` prepared (accelerate/accelerator.py)."""
    loaders: list[Any] = accelerator._dataloaders
    return loaders


def prepared_models(accelerator: Accelerator) -> list[nn.Module]:
    """Return the models that `accelerator` prepared (accelerate/accelerator.py)."""
    models: list[nn.Module] = accelerator._models
    return models


def prepared_optimizers(accelerator: Accelerator) -> list[AcceleratedOptimizer]:
    """Return the optimizers that `accelerator` prepared (accelerate/accelerator.py)."""
    optimizers: list[AcceleratedOptimizer] = accelerator._optimizers
    return optimizers


def clips_over_meshes(accelerator: Accelerator) -> bool:
    """Return True if Accelerate itself clips gradients on several device meshes.

    Since 1.15 (accelerate/accelerator.py). Before that torch's clip raises on two meshes.
    """
    return hasattr(accelerator, "_clip_grad_norm_dtensor_aware")


def has_chunked_loss(model: nn.Module) -> bool:
    """Return True if TRL replaced the forward of `model` by the forward of its chunked loss.

    trl/trainer/sft_trainer.py before 1.15; the default of SFTTrainer. That forward imports stock's
    function of the router's aux loss.
    """
    names = {getattr(forward, "__name__", "") for forward in forward_functions(model)}
    return "_chunked_ce_forward" in names


def gather_again(trainer: transformers.Trainer) -> None:
    """Make a Trainer call the current `gather_for_metrics` of its Accelerator.

    The Trainer has stored the bound method of before the Accelerator was specialised
    (transformers/trainer.py).
    """
    kept = getattr(trainer, "gather_function", None)
    function = kept.func if isinstance(kept, partial) else kept
    if getattr(function, "__name__", "") == "gather_for_metrics":
        options = kept.keywords if isinstance(kept, partial) else {}
        trainer.gather_function = partial(trainer.accelerator.gather_for_metrics, **options)


def generates_in_training(trainer: transformers.Trainer) -> bool:
    """Return True if each process of this trainer generates its own training samples.

    GRPO, RLOO, their subclasses and distillation do (trl/trainer/grpo_trainer.py).
    """
    return hasattr(trainer, "_generate_and_score_completions")


def checkpoint_folder(trainer: transformers.Trainer, trial: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step (transformers/trainer.py)."""
    return Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"


def save_beside(trainer: transformers.Trainer, folder: str, state_dict: Any) -> None:
    """Call `Trainer._save`, which writes a model, its tokenizer and the training arguments.

    transformers/trainer.py.
    """
    trainer._save(folder, state_dict=state_dict)
