"""Inspect torch.compile, and transformers' decorators around the forward of a layer.

The private names come from torch/_dynamo (exc.py, eval_frame.py, resume_execution.py, utils.py and
config.py), from torch/_functorch/config.py, and from transformers' modeling_layers.py and
utils/deprecation.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import config, eval_frame
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config

# The modules whose decorators handle checkpointing and renamed arguments. Compiled code is called
# inside these decorators.
_DECORATORS = ("transformers.modeling_layers", "transformers.utils.deprecation")


def list_compile_arguments() -> list[str]:
    """Return the names of the keyword arguments of torch.compile."""
    return [name for name in inspect.signature(torch.compile).parameters if name != "model"]


def is_compile_error(error: Exception) -> bool:
    """Return True if torch.compile itself raised `error`, and not the compiled function."""
    return isinstance(error, TorchDynamoException)


@contextmanager
def compile_backward_in_forward() -> Iterator[None]:
    """Compile a graph of backward together with its graph of forward, inside the block.

    Stock torch ignores an error of the backward's compilation in forward, and compiles again when
    backward runs (torch/_functorch/_aot_autograd/graph_compile.py). Inside the block such an error
    is raised in forward. torch reads the setting only when it makes a graph.
    """
    stock = autograd_config.force_non_lazy_backward_lowering
    autograd_config.force_non_lazy_backward_lowering = True
    try:
        yield
    finally:
        autograd_config.force_non_lazy_backward_lowering = stock


@contextmanager
def notice_new_hooks() -> Iterator[None]:
    """Make graphs, inside the block, that are not used after a hook is added to a traced module.

    By default torch assumes that hooks are never added or removed, and a graph ignores a hook that
    was registered after the graph was made (`skip_nnmodule_hook_guards` in torch/_dynamo/config.py,
    EMPTY_NN_MODULE_HOOKS_DICT in guards.py). torch reads the setting only when it makes a graph.
    """
    stock = config.skip_nnmodule_hook_guards
    config.skip_nnmodule_hook_guards = False
    try:
        yield
    finally:
        config.skip_nnmodule_hook_guards = stock


def has_given_up(compiled: Any, function: Any) -> bool:
    """Return True if `compiled`, torch.compile's result for `function`, runs without graphs.

    torch.compile gives up on a function that it cannot trace, and then runs the function uncompiled
    in each call. The result is False if the user has switched compilation off
    (TORCH_COMPILE_DISABLE, set_stance).
    """
    if compiled is function or eval_frame._stance.stance != "default":
        return False
    return not eval_frame._debug_get_cache_entry_list(function.__code__)


def count_untraced() -> int:
    """Return how often torch.compile ran a function uncompiled, because it could not be traced."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


def has_reached_limit(function: Any, limit: int | None) -> bool:
    """Return True if a part of `function` has as many graphs as torch.compile allows for one part.

    A graph break divides a function into parts, each of which has its own graphs.

    Args:
        function: the function that torch.compile was called with.
        limit: the argument `recompile_limit` of torch.compile, or None for torch's default.
    """
    if limit is None:
        limit = config.recompile_limit
    parts = [function.__code__]
    for code in parts:
        parts += ContinueExecutionCache.cache.get(code, {}).values()
    return any(len(eval_frame._debug_get_cache_entry_list(code)) >= limit for code in parts)


def is_wrapper_of_layers(function: Any) -> bool:
    """Return True if `function` was made by transformers' decorators of a layer's forward."""
    return getattr(function, "__globals__", {}).get("__name__") in _DECORATORS
