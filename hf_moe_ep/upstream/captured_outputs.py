"""Read and switch off transformers' collector of outputs, such as router logits.

Hooks of modules fill the collector, a context variable, which torch.compile cannot read: each read
breaks the graph. While transformers believes that a model is being compiled, the hooks read an
ordinary attribute instead (transformers/utils/output_capturing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.output_capturing import _active_collector

from hf_moe_ep.upstream.replaced import replaced


def list_collected_outputs() -> set[str]:
    """Return the names of the outputs that the current forward collects, such as router_logits."""
    return {name for name in _active_collector.get() or () if not name.startswith("_")}


@contextmanager
def without_collector() -> Iterator[None]:
    """Make hooks collect nothing inside the block, and let torch.compile trace these hooks."""
    if _active_collector.compiling:
        yield
        return
    _active_collector.global_var = None
    with replaced(_active_collector, "compiling", True):
        yield


@contextmanager
def with_collector() -> Iterator[None]:
    """Undo `without_collector` inside the block."""
    if not _active_collector.compiling or _active_collector.global_var is not None:
        yield
        return
    with replaced(_active_collector, "compiling", False):
        yield
