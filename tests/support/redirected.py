"""Call a model as TRL's DistillationTrainer does (`_ForwardRedirection` of trl/models/utils.py)."""

from collections.abc import Callable
from typing import Any

from torch import nn


def call_redirected(model: nn.Module, method: Callable[..., Any], *args: Any) -> Any:
    """Return `method(*args)`, which runs inside of `model(*args)` in place of the model's forward.

    The hooks of `model` run, and get the arguments of `method`.
    """
    stock = model.forward

    def forward(*given: Any) -> Any:
        model.forward = stock  # `method` may call the model itself
        return method(*given)

    model.forward = forward
    return model(*args)
