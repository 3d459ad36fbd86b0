"""Modes that see every operator, and fake tensors, which have a shape and no memory.

torch/utils/_python_dispatch.py, torch/_subclasses/fake_tensor.py; for the identity of storages
torch/csrc/Storage.cpp; for the shapes of DTensors torch/distributed/tensor/_sharding_prop.py.
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

# The method `__torch_dispatch__` of a subclass gets every operator that runs inside the mode.
OperatorMode = TorchDispatchMode
# Raised if a program reads the value of a fake tensor.
NoValue = DataDependentOutputException


def tensors_in(values: Any) -> list[Tensor]:
    """Collect the tensors in nested lists, tuples and dicts, in their order.

    This runs for the arguments of every operator; `tree_leaves` takes three times as long.
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
    """Return a mode in which operators create fake tensors; inputs may be fake or real."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def is_fake(x: object) -> bool:
    """Return True if `x` is a fake tensor."""
    return isinstance(x, FakeTensor)


def on_real_tensors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of the mode `fake_tensors`, so that it creates real tensors."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def dtensor_shapes() -> tuple[type, str, Callable[..., Any]]:
    """Return (class, name, replacement) of DTensor's method that computes the shape of a result.

    The method runs the operator on fake tensors of the global shape. Inside `fake_tensors` it uses
    the active modes, so that they see operators and sizes that are not part of the program. The
    replacement calls the stock method without any mode.
    """
    name = "_propagate_tensor_meta_non_cached"
    stock = vars(ShardingPropagator)[name]

    def without_modes(*args: Any) -> Any:
        with hidden_from_modes():
            return stock(*args)

    return ShardingPropagator, name, without_modes


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all tensors that share this storage."""
    return int(storage._cdata)
