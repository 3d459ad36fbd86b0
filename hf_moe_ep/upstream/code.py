"""Read the code of a module: the names that the code uses, and the arguments of the forward.

The code is in transformers/models/*/modeling_*.py. For example, a module that uses the
attention interface contains the name `ALL_ATTENTION_FUNCTIONS`, and a decoder layer is a
GradientCheckpointingLayer (transformers/modeling_layers.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def uses_name(module: nn.Module, name: str) -> bool:
    """Return True if the code of the module's class, or of a base class, uses the name `name`.

    Base classes from torch are not searched.
    """
    kind: Any = type(module)
    return name in _find_used_names(kind)


def list_forward_arguments(module: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a module's forward."""
    kind: Any = type(module)
    return _list_arguments(inspect.unwrap(kind.forward))


def takes_argument(module: nn.Module, name: str) -> bool:
    """Return True if the module's forward has an argument `name`, or accepts any keyword."""
    kind: Any = type(module)
    return accepts_keyword(inspect.unwrap(kind.forward), name)


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has an argument `name`, or accepts any keyword."""
    parameters = inspect.signature(function).parameters
    accepts_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return name in parameters or accepts_any


def takes_one_argument(module: nn.Module) -> bool:
    """Return True if the module's forward takes one argument without a default, and no *args.

    A forward that takes **kwargs, or needs a keyword-only argument, does not count.
    """
    kind: Any = type(module)
    parameters = list(inspect.signature(inspect.unwrap(kind.forward)).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1 == len([p for p in parameters if p.default is p.empty])


def is_checkpointed_layer(module: nn.Module) -> bool:
    """Return True if transformers' activation checkpointing recomputes `module` in backward."""
    return isinstance(module, GradientCheckpointingLayer)


@cache
def _list_arguments(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


@cache
def _find_used_names(kind: Any) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for attribute in vars(base).values():
            function = inspect.unwrap(attribute) if callable(attribute) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                names.update(name for inner in _iterate_inner(code) for name in inner.co_names)
    return frozenset(names)


def _iterate_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of all functions that are defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_inner(constant)
