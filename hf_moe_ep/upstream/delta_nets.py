"""The functions that a delta net of transformers calls, found in the globals of its file.

The names come from transformers' models/qwen3_next/modeling_qwen3_next.py and
models/kimi_linear/modeling_kimi_linear.py. A decorator there replaces a function by a kernel if the
package of the kernel is installed (integrations/hub_kernels.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

# convolution(x (B, C, S), weight (C, K), ...), and recurrence(query, key, value, g=..., beta=...)
# with tensors (B, S, heads, ...).
GATES = ("g", "beta")
CONVOLUTION = "causal_conv1d_fn"
RECURRENCES = (
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "torch_chunk_gated_delta_rule",
)


def is_delta_net(module: nn.Module) -> bool:
    """Return True if the forward of a module calls the convolution and one of the recurrences.

    `forward_with` cannot copy a forward that has defaults of keyword-only arguments.
    """
    function = _stock_forward(module)
    if function.__kwdefaults__:
        return False
    names = set(function.__code__.co_names) & function.__globals__.keys()
    return CONVOLUTION in names and not names.isdisjoint(RECURRENCES)


def convolution_width(module: Any) -> int:
    """Return the number of tokens in the kernel of a delta net's convolution."""
    return int(module.conv1d.kernel_size[0])


def forward_with(
    module: nn.Module, replacements: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the stock forward of a module, which calls other functions.

    A replacement gets the stock function as its first argument.
    """
    stock = _stock_forward(module)
    found = {
        name: partial(replacement, stock.__globals__[name])
        for name, replacement in replacements.items()
        if name in stock.__globals__
    }
    return FunctionType(
        stock.__code__,
        {**stock.__globals__, **found},
        stock.__name__,
        stock.__defaults__,
        stock.__closure__,
    )


def _stock_forward(module: nn.Module) -> Any:
    """Return the forward of the module's class without decorators."""
    return inspect.unwrap(type(module).forward)
