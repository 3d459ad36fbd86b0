"""Functions of torch.compile, and the decorators of transformers around the forward of a layer.

The private names come from torch/_dynamo/exc.py and transformers' modeling_layers.py and
utils/deprecation.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

# The modules whose decorators handle checkpointing and renamed arguments. Compiled code is called
# inside these decorators.
_DECORATORS = ("transformers.modeling_layers", "transformers.utils.deprecation")


def compile_arguments() -> list[str]:
    """Return the names of the keyword arguments of torch.compile."""
    return [name for name in inspect.signature(torch.compile).parameters if name != "model"]


def compile_backends() -> list[str]:
    """Return the names of all backends of torch.compile, including those for debugging."""
    return list(torch.compiler.list_backends(exclude_tags=()))


def is_compile_error(error: Exception) -> bool:
    """Return True if torch.compile raised `error`, and not the function that it compiles."""
    return isinstance(error, TorchDynamoException)


def is_decorator_of_layers(function: Any) -> bool:
    """Return True if `function` is a decorator of transformers around the forward of a layer."""
    return getattr(function, "__globals__", {}).get("__name__") in _DECORATORS
