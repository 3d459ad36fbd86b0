"""Facts read from the code of a module: the names that it uses, and the arguments of its forward.

transformers/models/*/modeling_*.py. A module that uses the attention interface looks its function
up in `ALL_ATTENTION_FUNCTIONS`. A decoder layer is a GradientCheckpointingLayer
(transformers/modeling_layers.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def calls(module: nn.Module, name: str) -> bool:
    """Return True if the code of the module's class, or of a base class, uses the name `name`.

    Base classes of torch are left out.
    """
    kind: Any = type(module)
    return name in _names_used(kind)


def forward_arguments(module: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a module's forward."""
    kind: Any = type(module)
    return _arguments(kind)


def is_checkpointed_layer(module: nn.Module) -> bool:
    """Return True if transformers' activation checkpointing checkpoints `module`."""
    return isinstance(module, GradientCheckpointingLayer)


@cache
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(inspect.unwrap(kind.forward)).parameters)


@cache
def _names_used(kind: Any) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for attribute in vars(base).values():
            function = inspect.unwrap(attribute) if callable(attribute) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                names.update(name for part in _with_inner(code) for name in part.co_names)
    return frozenset(names)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions defined inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
