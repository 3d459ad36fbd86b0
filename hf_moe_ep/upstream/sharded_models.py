"""Marks that FSDP, DDP and transformers leave on a model that they spread over ranks.

torch/distributed/fsdp/_fully_shard/, torch/distributed/tensor/_api.py, torch/nn/parallel/
distributed.py, transformers/distributed/fsdp.py.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def stock_class(kind: type) -> type:
    """A module's class before FSDP2 put its own in front."""
    return next(c for c in kind.__mro__ if not issubclass(c, FSDPModule))


def mark_fsdp_managed(model: nn.Module) -> None:
    """Keep ranks in step in `generate()` (transformers/distributed/fsdp.py).

    And keep the names of model classes, which FSDP2 changes: by them the Trainer decides whether
    label smoothing shifts labels (trainer.py, compute_loss).
    """
    for module in model.modules():
        if hasattr(module, "generate"):
            setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010  mypy: no such field
            if isinstance(module, FSDPModule):
                name = stock_class(type(module)).__name__
                setattr(module, "_get_name", functools.partial(str, name))  # noqa: B010  mypy


def is_distributed_by_transformers(model: nn.Module) -> bool:
    """Sharded at load time by `from_pretrained(distributed_config=...)` or `tp_plan=...`."""
    return (
        getattr(model, "is_distributed_loading_by_transformers", False) is True
        or (getattr(model, "_tp_size", None) or 1) > 1
    )


def inside_ddp_forward() -> bool:
    """Whether DistributedDataParallel is the caller (torch/nn/parallel/distributed.py)."""
    return DistributedDataParallel._active_ddp_module is not None


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 wraps the model or a part of it."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """A DTensor that lies as `like` does, on the device of `local`.

    Not from_local, which would bring it to the mesh's device (torch/distributed/tensor/_api.py).
    """
    return DTensor(local, like._spec, requires_grad=False)


def forget_finished_backward(unit: nn.Module, args: tuple[Any, ...]) -> None:
    """Let FSDP2 see the recompute of a second forward within one backward; a pre-forward hook.

    A nested unit stays in state PRE_BACKWARD after its backward until the whole backward ends, so
    when an enclosing checkpoint recomputes another forward (two forwards, one backward, reentrant)
    FSDP2 takes the unit for prepared, registers nothing and never reduces its gradients. Seen with
    torch 2.13 and the stock experts alike (torch/distributed/fsdp/_fully_shard/_fsdp_state.py), and
    with whole layers where transformers checkpoints their `__call__` (before 5.23).
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    if group is not None and group._training_state == TrainingState.POST_BACKWARD:
        state._training_state = TrainingState.IDLE
