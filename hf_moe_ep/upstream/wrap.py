"""How a function of another project gets one of ours in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args, **kwargs)` stand for `owner.name`, once per process."""
    original = getattr(owner, name)
    if hasattr(original, "_hf_moe_ep_wrapper"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._hf_moe_ep_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
