"""Refuse tensors made of numbers of the host, because on a GPU each of them is a host sync."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NoHostNumbers(TorchFunctionMode):
    """Raise AssertionError if numbers are copied to a device from memory that is not pinned.

    These copies wait for all work that is queued on the device. A tensor that stays on the CPU
    needs no copy: `device` is left out, or is "cpu".
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        on_device = kwargs.get("device") not in (None, "cpu") or func is Tensor.new_tensor
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and on_device:
            numbers = args[-1]
            assert isinstance(numbers, Tensor), f"{func.__name__}({numbers}) is a host sync"
        return func(*args, **kwargs)
