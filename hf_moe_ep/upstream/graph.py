"""Find the parameters that the autograd graph of a tensor reaches, and tensors in nested values.

The private names come from torch/autograd/graph.py and torch/utils/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn


def find_reached_parameters(
    tensors: Iterable[Tensor], candidates: Iterable[Tensor]
) -> tuple[set[int], set[int]]:
    """Return the ids of the `candidates` that get, and that may get, a gradient from `tensors`.

    The candidates in the first set get a gradient in a backward of `tensors`. The candidates in the
    second set may get a gradient, because they may be used inside a reentrant checkpoint, whose
    graph does not exist before backward. If the checkpointed function consists of modules, the
    second set has the candidates in these modules, otherwise all candidates.
    """
    candidate_ids = {id(candidate) for candidate in candidates}
    reached: set[int] = set()
    hidden: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        function = getattr(node, "run_function", None)
        if function is not None:
            modules = list(_find_modules(function))
            parameters = {id(parameter) for module in modules for parameter in module.parameters()}
            hidden |= parameters if modules else candidate_ids
        stack += [next_node for next_node, _ in node.next_functions]
    return reached & candidate_ids, (hidden & candidate_ids) - reached


def _find_modules(function: Any) -> Iterator[nn.Module]:
    """Yield the modules of a callable: a module, the owner of a method, arguments of a partial.

    transformers checkpoints `partial(forward, module, ...)`. Before 5.23 it checkpointed a partial
    of a method.
    """
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _find_modules(value)
    elif isinstance(function, MethodType):
        yield from _find_modules(function.__self__)


def list_tensors_in(values: Any) -> list[Tensor]:
    """List the tensors in nested lists, tuples and dicts, from first to last.

    Dispatch modes call this function for every operator, and torch's `tree_leaves` would take three
    times as long.
    """
    tensors: list[Tensor] = []
    _collect_tensors(values, tensors)
    return tensors


def _collect_tensors(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, list | tuple):
        for element in value:
            _collect_tensors(element, tensors)
    elif isinstance(value, dict):
        for element in value.values():
            _collect_tensors(element, tensors)


def with_tensors(values: Any, new_tensors: dict[int, Tensor]) -> Any:
    """Replace each tensor x in nested `values` by `new_tensors[id(x)]`, if this entry exists."""
    if isinstance(values, Tensor):
        return new_tensors.get(id(values), values)
    if type(values) is dict:
        return {name: with_tensors(value, new_tensors) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(with_tensors(value, new_tensors) for value in values)
    return values
