"""What torch knows of the backward and the checkpoint that run now.

torch/csrc/autograd/engine.cpp, torch/utils/_python_dispatch.py, torch/utils/checkpoint.py,
torch/csrc/utils/disable_torch_function.cpp.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def backward_is_running() -> bool:
    """Return whether a backward is running now, read off autograd's graph task.

    torch/csrc/autograd/engine.cpp.
    """
    return torch._C._current_graph_task_id() != -1


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Return a context manager that hides what runs inside from all dispatch modes.

    Selective checkpointing is such a mode: it counts the operators that it sees.
    """
    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def hidden_from_function_modes() -> AbstractContextManager[Any]:
    """Return a context manager that hides what runs inside from all `TorchFunctionMode`s.

    torch/csrc/utils/disable_torch_function.cpp.
    """
    hidden: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return hidden


def assert_later(condition: Tensor, message: str) -> None:
    """Raise with `message` once the device finds `condition` (a one-element tensor) false.

    The host does not wait for the answer. A GPU puts `message` (255 characters at most) on stderr
    and stops; what waits for it next raises an AcceleratorError, which does not repeat the message.
    """
    torch._assert_async(condition, message)


def is_view(tensor: Tensor) -> bool:
    """Return whether `tensor` is a view of another tensor to autograd."""
    return tensor._is_view()
