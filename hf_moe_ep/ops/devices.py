"""Launch kernels on the device of their tensors, and copy tensors to another device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
# `devices`: the devices for which `_make_context_current` has run in this thread.
_thread = threading.local()


def make_device_current(
    function: Callable[Concatenate[Tensor, _P], _R],
) -> Callable[Concatenate[Tensor, _P], _R]:
    """Wrap `function` so that the device of its first argument is current during each call.

    Triton launches kernels on the current device. For loads by TMA, Triton calls CUDA's driver,
    which needs a context that is current in the calling thread.
    """

    @wraps(function)
    def on_device(tensor: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.cuda.device_of(tensor):
            if tensor.is_cuda:
                _make_context_current(tensor.device)
            return function(tensor, *args, **kwargs)

    return on_device


def copy_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. A copy from pinned memory to a GPU causes no host sync."""
    # A copy from a GPU to the host with `non_blocking=True` returns before the host has the values.
    return x.to(device, non_blocking=torch.device(device).type != "cpu")


def _make_context_current(device: torch.device) -> None:
    """Make the device's CUDA context current in this thread, once per thread and device.

    Autograd computes gradients in its own threads. No context is current in such a thread before
    the first launch by CUDA's runtime, so this function launches a kernel of torch.
    """
    known: set[torch.device] = _thread.__dict__.setdefault("devices", set())
    if device not in known:
        torch.zeros((), device=device)
        known.add(device)
