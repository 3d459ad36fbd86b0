"""What torch knows of the backward and the checkpoint that run now.

torch/csrc/autograd/engine.cpp, torch/utils/_python_dispatch.py, torch/utils/checkpoint.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError

# Raised in a recompute once all that backward needs is there (torch/utils/checkpoint.py).
StopRecomputation = _StopRecomputationError


def backward_is_running() -> bool:
    """Whether a graph task runs, as it does exactly while backward does (autograd/engine.cpp)."""
    return torch._C._current_graph_task_id() != -1


def hidden_from_modes() -> AbstractContextManager[Any]:
    """A block that no dispatch mode sees, among them selective checkpointing's counting."""
    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def assert_later(condition: Tensor, message: str) -> None:
    """An assertion on the device: nobody waits for it."""
    torch._assert_async(condition, message)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another."""
    return tensor._is_view()
