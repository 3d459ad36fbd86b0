"""Replace attributes of modules and classes for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replace_attribute(owner: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class inside the block."""
    stock = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)
