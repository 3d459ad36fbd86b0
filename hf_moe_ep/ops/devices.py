"""`on_its_device` launches kernels on the device of their tensors, also if another is current."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def on_its_device(
    function: Callable[Concatenate[Tensor, _P], _R],
) -> Callable[Concatenate[Tensor, _P], _R]:
    """Make the first argument's device current during a call of `function`.

    Triton launches kernels on the current device.
    """

    @wraps(function)
    def on_device(tensor: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.cuda.device_of(tensor):
            return function(tensor, *args, **kwargs)

    return on_device
