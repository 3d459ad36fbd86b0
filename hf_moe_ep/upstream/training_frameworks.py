"""What Accelerate and the Trainer keep to themselves, and wrappers of `integrations/` need.

accelerate/state.py, accelerate/accelerator.py, transformers/trainer.py, trl/trainer/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from hf_moe_ep.upstream.replaced_forwards import forward_functions


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
    """Return whether Accelerate itself clips gradients that lie on several device meshes.

    Since 1.15 (accelerate/accelerator.py). Before that torch's clip raises on two meshes.
    """
    return hasattr(accelerator, "_clip_grad_norm_dtensor_aware")


def has_chunked_loss(model: nn.Module) -> bool:
    """Return whether TRL replaced the forward of `model` by the one of its chunked loss.

    trl/trainer/sft_trainer.py, before 1.15; the default of its SFTTrainer. It imports the function
    of the router's aux loss itself.
    """
    names = {getattr(forward, "__name__", "") for forward in forward_functions(model)}
    return "_chunked_ce_forward" in names


def generates_in_training(trainer: transformers.Trainer) -> bool:
    """Return whether each process of this trainer generates what it learns from.

    As GRPO, RLOO, their subclasses and distillation do (trl/trainer/grpo_trainer.py).
    """
    return hasattr(trainer, "_generate_and_score_completions")


def checkpoint_folder(trainer: transformers.Trainer, trial: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step (transformers/trainer.py)."""
    return Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"


def save_beside(trainer: transformers.Trainer, folder: str, state_dict: Any) -> None:
    """Call `Trainer._save`: write a model, and what the Trainer saves beside it.

    transformers/trainer.py.
    """
    trainer._save(folder, state_dict=state_dict)


@contextmanager
def end_of_checkpoint(
    trainer: transformers.Trainer,
    rotate: Callable[..., None],
    push: Callable[..., None],
) -> Iterator[None]:
    """Replace the two last steps of `Trainer._save_checkpoint`, inside the block.

    They delete old checkpoints and push to the hub. `rotate` and `push` are called instead, with
    stock's function first.
    """
    stock_rotate = transformers.trainer.rotate_checkpoints
    stock_push = trainer._push_from_checkpoint
    transformers.trainer.rotate_checkpoints = lambda *args, **kw: rotate(stock_rotate, *args, **kw)
    trainer._push_from_checkpoint = lambda *args, **kw: push(stock_push, *args, **kw)
    try:
        yield
    finally:
        transformers.trainer.rotate_checkpoints = stock_rotate
        del trainer._push_from_checkpoint
