"""What sees every operator that runs, and tensors that have a shape and no memory.

torch/utils/_python_dispatch.py, torch/_subclasses/fake_tensor.py, torch/csrc/Storage.cpp for what
tells storages apart, and torch/distributed/tensor/_sharding_prop.py for how a DTensor finds out the
shape of a result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep.upstream.autograd_modes import hidden_from_modes

__all__ = [
    "NoValue",
    "OperatorMode",
    "dtensor_shapes",
    "fake_tensors",
    "is_fake",
    "on_real_tensors",
    "storage_id",
    "tensors_in",
]

# Subclasses get every operator that runs inside them, as `__torch_dispatch__`.
OperatorMode = TorchDispatchMode
# Raised where a program asks for the value of a tensor that has none.
NoValue = DataDependentOutputException


def tensors_in(values: Any) -> list[Tensor]:
    """Collect the tensors in nested lists, tuples and dicts, in their order.

    Asked for what every operator is given; `tree_leaves` takes three times as long.
    """
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a mode in which operators make tensors without memory; others may be their inputs."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_fake(x: object) -> bool:
    """Return whether `x` is a tensor without memory."""
    return isinstance(x, FakeTensor)


def on_real_tensors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of tensors that have memory, for others that have: outside of that mode."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def dtensor_shapes() -> tuple[type, str, Callable[..., Any]]:
    """Return where DTensors find out shapes by an operator on whole fake tensors, and a new way.

    Where fake tensors are being made already they take that mode, and every mode above it sees
    operators and sizes that are no part of the program. The new way is the old one without modes.
    """
    name = "_propagate_tensor_meta_non_cached"
    stock = vars(ShardingPropagator)[name]

    def unseen(*args: Any) -> Any:
        with hidden_from_modes():
            return stock(*args)

    return ShardingPropagator, name, unseen


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return what tensors have in common that share a storage."""
    return int(storage._cdata)
