"""Functions of torch.compile, and the decorators of transformers around the forward of a layer.

The private names come from torch/_dynamo/exc.py and eval_frame.py, and from transformers'
modeling_layers.py and utils/deprecation.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._dynamo import eval_frame
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


def has_given_up(compiled: Any, function: Any) -> bool:
    """Return True if `compiled`, torch.compile's result for `function`, runs without graphs.

    torch.compile gives up a function that it cannot trace, and then runs this function as it is in
    each call. The result is False if the user has switched compilation off (TORCH_COMPILE_DISABLE,
    set_stance).
    """
    if compiled is function or eval_frame._stance.stance != "default":
        return False
    return not eval_frame._debug_get_cache_entry_list(function.__code__)


def is_decorator_of_layers(function: Any) -> bool:
    """Return True if `function` is a decorator of transformers around the forward of a layer."""
    return getattr(function, "__globals__", {}).get("__name__") in _DECORATORS
