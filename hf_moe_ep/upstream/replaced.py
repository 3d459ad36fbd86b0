"""Replace an attribute of an object, class or module for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block, set the attribute `name` of `owner`, which may inherit it, to `value`."""
    getattr(owner, name)  # raises AttributeError for a name that does not exist
    is_own, stock = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)
