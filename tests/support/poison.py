"""Uninitialised memory that betrays itself.

`torch.empty` usually returns zeros by luck, so a kernel that leaves rows unwritten passes its test
and fails in production. After `poison_empty()` every floating-point tensor that code of hf_moe_ep
creates uninitialised is full of NaN; all other callers, torch and transformers included, get what
they always got. The caller is found by its module name, one frame up: only direct calls count
(`torch.empty(...)`, `x.new_empty(...)`).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

PACKAGES = ("hf_moe_ep",)
_FACTORIES = (
    (torch, ("empty", "empty_like", "empty_strided")),
    (torch.Tensor, ("new_empty", "new_empty_strided")),
)


def poison_empty() -> None:
    """Patch the factories of uninitialised tensors; a second call does nothing."""
    # Cached set of functions that obey `with torch.device(...)`: filled after the patch it would
    # hold the wrappers, and the real factories would ignore the device.
    _device_constructors()
    for owner, names in _FACTORIES:
        for name in names:
            factory = getattr(owner, name)
            if not hasattr(factory, "poisoned"):
                setattr(owner, name, _poisoned(factory))


def _poisoned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = factory(*args, **kwargs)
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "")
        # A mode only passes on what somebody else called, who is seen by the wrapper above it.
        passed_on = frame.f_code.co_name == "__torch_function__"
        if caller.partition(".")[0] in PACKAGES and tensor.is_floating_point() and not passed_on:
            with torch.no_grad():  # a leaf that requires grad refuses in-place writes
                tensor.fill_(float("nan"))
        return tensor

    wrapper.poisoned = True  # type: ignore[attr-defined]
    return wrapper
