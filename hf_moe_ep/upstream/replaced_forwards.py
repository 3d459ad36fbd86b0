"""Who computes a module: its class, or a function that somebody put in front of it.

Liger (liger_kernel/transformers/monkey_patch.py, called by transformers/integrations/liger.py)
binds forwards to the modules of a model, and puts its own classes, such as LigerExperts of
liger_kernel/transformers/swiglu.py, in place of those from which later models are built. Hub
kernels (transformers/integrations/hub_kernels.py) bind forwards too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_LIGER = "liger_kernel"


def forward_functions(module: Any) -> Iterator[Callable[..., Any]]:
    """Yield the function behind `module.forward`, and what it wraps, outermost first.

    Accelerate's autocast and its hooks say what they wrap (functools.wraps); of other wrappers it
    is the forward of this module that they hold, in a closure, a default or a partial.
    """
    forward = module.forward
    while forward is not None:
        yield getattr(forward, "__func__", forward)
        forward = getattr(forward, "__wrapped__", None) or _held_forward(forward, module)


def _held_forward(wrapper: Any, module: Any) -> Any:
    """Return a method of `module` that a wrapper of its forward holds, None if there is none."""
    if getattr(wrapper, "__self__", None) is module:
        return None  # a method itself
    held = [getattr(wrapper, "func", None), *getattr(wrapper, "args", ())]
    held += getattr(wrapper, "keywords", {}).values()
    held += getattr(wrapper, "__defaults__", None) or ()
    held += (getattr(wrapper, "__kwdefaults__", None) or {}).values()
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return next((x for x in held if callable(x) and getattr(x, "__self__", None) is module), None)


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """Return the function that computes modules of this class where nobody replaced it."""
    function: Callable[..., Any] = type(module).forward
    return function


def class_with_forward(module: nn.Module) -> tuple[type, Callable[..., Any]]:
    """Return the class from which `module` has its forward, and that function."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return owner, vars(owner)["forward"]


def qualified_name(function: Any) -> str:
    """Name a function with its module, for errors."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def is_ligers(function: Any) -> bool:
    """Return whether a function, or a class, is one of Liger's."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == _LIGER


def is_computed_by_liger(module: nn.Module) -> bool:
    """Return whether Liger computes `module`: by a forward bound to it, or as its class."""
    return any(is_ligers(function) for function in forward_functions(module))


def liger_kernels_are_loaded() -> bool:
    """Return whether Liger's Triton kernels are imported (liger_kernel/ops/)."""
    return f"{_LIGER}.ops" in sys.modules
