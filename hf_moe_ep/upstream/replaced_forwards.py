"""Find the function that runs as the forward of a module: stock code or a replacement.

Liger (liger_kernel/transformers/monkey_patch.py, called by transformers/integrations/liger.py)
binds forwards to the modules of a model. Before a model is built, Liger also replaces classes of
transformers by its own classes, such as LigerExperts in liger_kernel/transformers/swiglu.py. Hub
kernels (transformers/integrations/hub_kernels.py) bind forwards too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

_LIGER = "liger_kernel"
_KNOWN = ("accelerate", "hf_moe_ep", "torch", "transformers")


def iterate_forward_functions(module: Any) -> Iterator[Callable[..., Any]]:
    """Yield the function of `module.forward` and the functions that it wraps, the outermost first.

    Wrappers of Accelerate (autocast, hooks) store the wrapped function in `__wrapped__`. Other
    wrappers refer to a bound method of this module in a closure, a default or a partial.
    """
    forward = module.forward
    while forward is not None:
        yield getattr(forward, "__func__", forward)
        forward = getattr(forward, "__wrapped__", None) or _find_wrapped_method(forward, module)


def _find_wrapped_method(wrapper: Any, module: Any) -> Any:
    """Return the method of `module` that a wrapper of its forward refers to, or None."""
    if getattr(wrapper, "__self__", None) is module:
        return None  # The wrapper is itself a method of the module.
    references = [getattr(wrapper, "func", None), *getattr(wrapper, "args", ())]
    references += getattr(wrapper, "keywords", {}).values()
    references += getattr(wrapper, "__defaults__", None) or ()
    references += (getattr(wrapper, "__kwdefaults__", None) or {}).values()
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            references.append(cell.cell_contents)
        except ValueError:  # The cell is empty.
            continue
    methods = (x for x in references if callable(x) and getattr(x, "__self__", None) is module)
    return next(methods, None)


def find_class_with_forward(module: nn.Module) -> tuple[type, Callable[..., Any]]:
    """Return the class that defines the forward of `module`, and this forward."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return owner, vars(owner)["forward"]


def get_qualified_name(function: Any) -> str:
    """Return the dotted Python path of a function, for errors."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def find_foreign_wrapper(module: nn.Module) -> str:
    """Return the name of a wrapper around the forward of `module` that may read its output, or "".

    The wrappers of transformers, Accelerate and torch are known to read no output. The result is ""
    for a function that replaces the forward and calls no method of the module.
    """
    *wrappers, _ = iterate_forward_functions(module)
    return next((get_qualified_name(x) for x in wrappers if is_foreign(x)), "")


def is_foreign(function: Any) -> bool:
    """Return True if a hook or wrapper is not code of torch, transformers, Accelerate or hf_moe_ep.

    `functools.wraps` copies `__module__` from the wrapped function, but not `__globals__`.
    """
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    variables = getattr(function, "__globals__", None)
    module = type(function).__module__ if variables is None else variables["__name__"]
    return module.partition(".")[0] not in _KNOWN


def belongs_to_liger(function_or_class: Any) -> bool:
    return str(getattr(function_or_class, "__module__", "")).partition(".")[0] == _LIGER


def is_computed_by_liger(module: nn.Module) -> bool:
    """Return True if Liger computes `module`, with a bound forward or with a class of Liger."""
    return any(belongs_to_liger(function) for function in iterate_forward_functions(module))


def liger_kernels_are_loaded() -> bool:
    """Return True if Liger's Triton kernels are imported (liger_kernel/ops/)."""
    return f"{_LIGER}.ops" in sys.modules
