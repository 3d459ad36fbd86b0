"""transformers' collector of outputs, such as router logits, which hooks of modules fill.

The collector is a context variable, which torch.compile cannot read: each read breaks the graph.
While transformers believes that a model is being compiled, the hooks read an ordinary attribute
instead (transformers/utils/output_capturing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import output_capturing


def collected_outputs() -> set[str]:
    """Return the names of the outputs that the current forward collects, such as router_logits."""
    collector = _collector()
    outputs = None if collector is None else collector.get()
    return {name for name in outputs or () if not name.startswith("_")}


@contextmanager
def without_collector() -> Iterator[None]:
    """Make hooks collect nothing inside the block, and let torch.compile trace these hooks."""
    collector = _collector()
    if collector is None or collector.compiling:
        yield
        return
    collector.compiling, collector.global_var = True, None
    try:
        yield
    finally:
        collector.compiling = False


@contextmanager
def with_collector() -> Iterator[None]:
    """Undo `without_collector` inside the block."""
    collector = _collector()
    if collector is None or not collector.compiling or collector.global_var is not None:
        yield
        return
    collector.compiling = False
    try:
        yield
    finally:
        collector.compiling = True


def _collector() -> Any:
    return getattr(output_capturing, "_active_collector", None)
