"""Call private functions of torch for backward, modes, hooks, views and asserts on the device.

The private names come from torch/csrc/autograd/engine.cpp, torch/utils/_python_dispatch.py,
torch/utils/checkpoint.py, torch/autograd/__init__.py, torch/autograd/forward_ad.py,
torch/csrc/autograd/init.cpp and torch/csrc/utils/disable_torch_function.cpp.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def backward_is_running() -> bool:
    """Return True during a backward. Autograd has a graph task only in a backward (engine.cpp)."""
    return torch._C._current_graph_task_id() != -1


def saved_tensors_are_hooked() -> bool:
    """Return True if hooks replace the tensors that autograd saves.

    Non-reentrant activation checkpointing sets such hooks, and so does offloading of activations.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Return a context manager inside which no dispatch mode sees the operators.

    For example, selective activation checkpointing has a mode that needs to see the same operators
    in the forward and in the recompute.
    """
    return _disable_current_modes()


def hidden_from_function_modes() -> AbstractContextManager[Any]:
    """Return a context manager inside which no `TorchFunctionMode` sees calls of torch."""
    return torch._C.DisableTorchFunction()


def operators_are_observed() -> bool:
    """Return True if a `TorchDispatchMode` sees the operators that this thread calls.

    For example, selective activation checkpointing, fake tensors and torch's counter of FLOPs have
    such modes.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def forward_gradients_are_computed() -> bool:
    """Return True inside `torch.autograd.forward_ad.dual_level`, which torch.func.jvp enters."""
    level: int = vars(forward_ad)["_current_level"]
    return level >= 0


def assert_later(condition: Tensor, message: str) -> None:
    """Check on the device, without a host sync, that `condition` (a one-element tensor) is true.

    If the condition is false, a GPU prints `message` (at most 255 characters) to stderr and stops.
    The next call that waits for the GPU raises an AcceleratorError without the message.
    """
    torch._assert_async(condition, message)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return True if `register_post_accumulate_grad_hook` was called on a parameter.

    FSDP2 calls these hooks after each reduction of gradients (_fully_shard/_fsdp_collectives.py).
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_tensor_hooks(parameter: Tensor) -> bool:
    """Return True if `Tensor.register_hook` was called on a parameter.

    FSDP2 does not call these hooks, because it sets the gradients of its parameters itself.
    """
    return bool(parameter._backward_hooks)


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd treats `tensor` as a view of another tensor."""
    return tensor._is_view()


def get_next_sequence_number() -> int:
    """Return the sequence number of the next autograd node that this thread makes in forward."""
    return vars(torch.autograd)["_get_sequence_nr"]()


def get_running_sequence_number() -> int | None:
    """Return the sequence number of the node that backward runs, or None outside of a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
