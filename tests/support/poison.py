"""Fill uninitialised memory with NaN, so that tests find values that were never written.

`torch.empty` often returns zeros by luck. A kernel that leaves rows unwritten then passes its test
and fails in production. After `poison_empty()`, every uninitialised floating-point tensor that code
of hf_moe_ep creates is full of NaN. For all other callers, torch and transformers included, nothing
changes. The caller is found by the module name of the calling frame, so only direct calls count
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
    # This call fills torch's cached set of functions that obey `with torch.device(...)`. If it were
    # filled after the patch, it would hold the wrappers, and the real factories would ignore it.
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
        # A mode of hf_moe_ep passes on calls of other code. The wrapper around the mode sees the
        # real caller.
        from_mode = frame.f_code.co_name == "__torch_function__"
        if caller.partition(".")[0] in PACKAGES and tensor.is_floating_point() and not from_mode:
            with torch.no_grad():  # a leaf that requires grad refuses in-place writes
                tensor.fill_(float("nan"))
        return tensor

    wrapper.poisoned = True  # type: ignore[attr-defined]
    return wrapper
