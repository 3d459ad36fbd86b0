"""Read in the code of a causal language model's forward how it uses the head and the loss function.

Most forwards in transformers/models/*/modeling_*.py compute

    logits = self.lm_head(hidden_states)
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=..., **kwargs)

and return `logits=logits`. A few forwards scale or cap the logits in between. For these forwards,
`find_other_use_of_logits` returns the statement that uses the logits. The loss function is
`ForCausalLMLoss` of transformers/loss/loss_utils.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_moe_ep.upstream.replaced_forwards import iterate_forward_functions

_LOSS = "loss_function"


def is_causal_loss(function: Any) -> bool:
    """Return True if `function` is transformers' loss of causal language models."""
    return function is ForCausalLMLoss


def find_other_use_of_logits(model: nn.Module, head_name: str) -> str:
    """Return the statement in which the model's forward uses logits for more than the loss.

    The result is "" if the forward passes the output of `self.<head_name>` only to its loss
    function and into its output. If the forward cannot be read or does not have this shape, the
    result describes that.
    """
    *_, innermost = iterate_forward_functions(model)
    return _find_other_use(innermost, head_name)


def passes_arguments_to_loss(model: nn.Module) -> bool:
    """Return False if the forward of a model does not pass its other arguments on to its loss.

    Before transformers 5.23, the forwards of some vision-language models do not. The result is True
    for a forward whose code cannot be read, or that computes its loss in another way.
    """
    *_, innermost = iterate_forward_functions(model)
    return _passes_arguments(innermost)


@cache
def _passes_arguments(forward: Callable[..., Any]) -> bool:
    tree = _parse(forward)
    calls = [] if tree is None else _list_calls(tree, _LOSS)
    return not calls or any(keyword.arg is None for call in calls for keyword in call.keywords)


@cache
def _find_other_use(forward: Callable[..., Any], head_name: str) -> str:
    tree = _parse(forward)
    if tree is None:
        return "its source cannot be read"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = _list_calls(tree, head_name)
    if len(calls) != 1:
        return f"it calls self.{head_name} {len(calls)} times"
    for node in ast.walk(tree):
        is_other = _is_attribute_of_self(node, head_name) and node is not calls[0].func
        if is_other and not _reads_dtype_of_weight(node, parents):
            return _unparse_statement(node, parents)
    if len(calls[0].args) != 1 or calls[0].keywords:
        return _unparse_statement(calls[0], parents)
    value: ast.AST = calls[0]
    if _is_attribute(parents[value], "float"):  # self.lm_head(hidden_states).float()
        value = parents[parents[value]]
    statement = parents[value]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return _unparse_statement(value, parents)
    return _find_other_use_of_variable(targets[0], tree, parents)


def _find_other_use_of_variable(
    target: ast.Name, tree: ast.AST, parents: dict[ast.AST, ast.AST]
) -> str:
    """Return the statement that uses a variable for more than the loss and the output, or ""."""
    reaches_loss = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id != target.id or node is target:
            continue
        holder = parents[node]
        in_output = isinstance(holder, ast.keyword) and holder.arg == target.id
        call = parents[holder] if isinstance(holder, ast.keyword) else holder
        if not isinstance(call, ast.Call) or node is call.func:
            return _unparse_statement(node, parents)
        if _is_attribute_of_self(call.func, _LOSS):
            reaches_loss = True
        elif not (in_output and isinstance(parents[call], ast.Return)):
            return _unparse_statement(node, parents)
    return "" if reaches_loss else f"it does not pass {target.id} to self.{_LOSS}"


def _parse(function: Callable[..., Any]) -> ast.Module | None:
    """Return the syntax tree of a function, or None if its code cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _list_calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """List the calls of `self.<name>`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if _is_attribute_of_self(call.func, name)]


def _is_attribute_of_self(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _reads_dtype_of_weight(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    weight = parents[node]
    return _is_attribute(weight, "weight") and _is_attribute(parents[weight], "dtype")


def _unparse_statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """Return the statement that contains a node as one line."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    first_line, *_ = ast.unparse(node).splitlines()
    return first_line
