"""Make dispatch modes, which see every operator that runs, and fake tensors, which have no memory.

The private names come from torch/utils/_python_dispatch.py (modes), torch/utils/_pytree.py (nested
values), torch/csrc/Storage.cpp (the identity of a storage), torch/_subclasses/fake_tensor.py (fake
tensors) and torch/distributed/tensor/_sharding_prop.py (the shapes of DTensors).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hf_moe_ep.upstream.autograd_modes import hidden_from_modes

# A subclass defines `__torch_dispatch__`, which is called for every operator inside the mode.
OperatorMode = TorchDispatchMode
# The errors that torch raises if a program needs values of a fake tensor: the first if it needs a
# number (`item`), the second if the shape of a result depends on the values (`nonzero`).
NoValue = (DataDependentOutputException, DynamicOutputShapeException)


def make_fake_mode() -> AbstractContextManager[Any]:
    """Return a mode inside which operators create fake tensors. Inputs may be fake or real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(x: object) -> bool:
    """Return True if `x` is a fake tensor."""
    return isinstance(x, FakeTensor)


def call_on_real_tensors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that creates real tensors, although fake tensors are made."""
    with unset_fake_temporarily():
        return function(*args, **kwargs)


def find_dtensor_shapes_method() -> tuple[type, str, Callable[..., Any]]:
    """Return (class, method name, replacement) for the method that computes shapes of DTensors.

    To find the shape of a result, the stock method runs the operator on fake tensors of the global
    shape. Inside `make_fake_mode()` the active modes would see these operators and sizes, which are
    not part of the program. The replacement hides the stock method from all modes.
    """
    name = "_propagate_tensor_meta_non_cached"
    stock = vars(ShardingPropagator)[name]

    def without_modes(*args: Any) -> Any:
        with hidden_from_modes():
            return stock(*args)

    return ShardingPropagator, name, without_modes


def replace_in(values: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Call `function` on every object of class `kind` in nested lists, tuples and dicts."""
    return tree_map_only(kind, function, values)


def make_tensor_without_memory(kind: Any) -> Any:
    """Make a tensor of the subclass `kind` without elements and without memory.

    `kind` needs a method __torch_dispatch__. The tensor requires a gradient where gradients are
    enabled, so code that gives it to an autograd function fails in backward.
    """
    requires_grad = torch.is_grad_enabled()
    return torch.Tensor._make_wrapper_subclass(kind, (0,), requires_grad=requires_grad)


def get_storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all tensors that share this storage."""
    return int(storage._cdata)
