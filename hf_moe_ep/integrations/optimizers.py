"""Optimizers that cannot take a sharded model's parameters, named at their first step.

FSDP2's parameters are DTensors. An optimizer that makes its state with `torch.zeros(shape)` has
plain tensors beside them, another computes in place what no shard can hold; torch names the
operation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor

from hf_moe_ep.upstream.sharded_models import is_refused_by_dtensor

# Of torch.optim: run on sharded models beside one process
# (tests/integrations/test_sharded_optimizers.py).
WORKING = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)


def step(
    original: Callable[..., Any],
    self: AcceleratedOptimizer,
    closure: Callable[..., Any] | None = None,
) -> Any:
    """`AcceleratedOptimizer.step`, with an error that names the optimizer.

    Raises:
        ValueError: its state or its arithmetic does not take DTensors.
    """
    try:
        return original(self, closure)
    except RuntimeError as error:
        parameters = [p for group in self.param_groups for p in group["params"]]
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        if not sharded or not is_refused_by_dtensor(error):
            raise
        kind, said = type(self.optimizer), str(error).partition("\n")[0]
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} cannot train a sharded model: its state or "
            f"its arithmetic does not take FSDP2's DTensors ({said}). "
            f"Of torch.optim these can: {', '.join(WORKING)}"
        ) from error
