"""Refuse the steps of an optimizer that was created before its model was sharded.

    optimizer = AdamW(model.parameters())
    apply_ep_fsdp2(model)                     # gives the model other parameters
    model(**batch).loss.backward()            # only the new parameters get gradients
    optimizer.step()                          # has the old parameters: raises ValueError

An optimizer skips parameters without gradients, so without this error such a loop would run to its
end with the loss of its first step. Accelerate gives the new parameters to the optimizers that it
prepares together with the model.

torch calls a hook before the steps of every optimizer in the process. The hook is removed after the
first step of an optimizer that has parameters of a sharded model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

# The hook while it is registered.
_handles: list[RemovableHandle] = []
_REPLACED = "_hf_moe_ep_replaced"


def mark_as_replaced(parameter: nn.Parameter) -> None:
    """Remember that sharding has replaced a parameter, which no optimizer can train any more."""
    setattr(parameter, _REPLACED, True)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_refuse_replaced))


def _refuse_replaced(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError if an optimizer has parameters that sharding has replaced.

    Another model may share such a parameter and train it; then the parameter has a gradient.
    """
    if torch.compiler.is_compiling():
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lost = [p for p in parameters if hasattr(p, _REPLACED) and p.grad is None]
    if lost:
        raise ValueError(
            f"{len(lost)} of {len(parameters)} parameters of this {type(optimizer).__name__} were "
            f"replaced when the model was sharded, so this step would not train the model; create "
            f"the optimizer after apply_ep_fsdp2(model), or pass model and optimizer to "
            f"accelerator.prepare together"
        )
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        # A hook must not remove itself while torch calls the hooks of its kind.
        optimizer.register_step_post_hook(_remove_hook)


def _remove_hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    while _handles:
        _handles.pop().remove()
