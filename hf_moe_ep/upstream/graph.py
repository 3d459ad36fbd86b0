"""The parameters that the autograd graph of a tensor reaches, and tensors in nested values.

torch/autograd/graph.py, torch/utils/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn


def reached_parameters(
    tensors: Iterable[Tensor], candidates: Iterable[Tensor]
) -> tuple[set[int], set[int]]:
    """Return two sets of ids of those `candidates` that get a gradient in a backward of `tensors`.

    The candidates of the first set get a gradient, those of the second set may get one: they are
    inside a reentrant checkpoint, which hides its graph. If the checkpoint runs modules, these are
    the parameters of the modules, otherwise all candidates.
    """
    wanted = {id(candidate) for candidate in candidates}
    found: set[int] = set()
    hidden: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        run = getattr(node, "run_function", None)
        if run is not None:
            modules = list(_modules_in(run))
            inside = {id(parameter) for module in modules for parameter in module.parameters()}
            hidden |= inside if modules else wanted
        stack += [following for following, _ in node.next_functions]
    return found & wanted, (hidden & wanted) - found


def _modules_in(run: Any) -> Iterator[nn.Module]:
    """Yield the modules of a callable: a module, the owner of a method, arguments of a partial.

    transformers checkpoints `partial(forward, module, ...)`, before 5.23 a partial of a method.
    """
    if isinstance(run, nn.Module):
        yield run
    elif isinstance(run, partial):
        for part in (run.func, *run.args, *run.keywords.values()):
            yield from _modules_in(part)
    elif isinstance(run, MethodType):
        yield from _modules_in(run.__self__)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or outputs of a forward."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def with_tensors(values: Any, others: dict[int, Tensor]) -> Any:
    """Replace tensors in nested `values`; `others` has the new tensors by the ids of the old."""
    if isinstance(values, Tensor):
        return others.get(id(values), values)
    if type(values) is dict:
        return {name: with_tensors(value, others) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(with_tensors(value, others) for value in values)
    return values
