"""Compare the namespaces of other packages before and after a script uses hf_moe_ep.

`stock_names()` lists every function and class that is an attribute of a module, or of a class that
the module defines. `replaced(before)` then returns the attributes that are gone or hold code of
ours, also in modules that were imported later, and our import finders in `sys.meta_path`. Other
changes are those of the packages themselves: torch._dynamo replaces functions of torch.optim.
"""

import sys
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hf_moe_ep

PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
_OURS = str(Path(hf_moe_ep.__file__).parent)


def stock_names() -> dict[str, Any]:
    """Return "module:name" or "module:Class.name" -> value of everything that can be called."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    function = getattr(inner, "__func__", inner)  # of static and class methods
                    if isinstance(function, FunctionType):
                        found[f"{name}:{attribute}.{member}"] = function
    return found


def replaced(before: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of the module docstring, with the values that they have now."""
    now = stock_names()
    names = before.keys() - now.keys()
    # The members of a class that is gone are not counted beside the class.
    gone: dict[str, Any] = {n: None for n in names if n.rpartition(".")[0] not in names}
    ours = {name: value for name, value in now.items() if _is_ours(value)}
    finders: dict[str, Any] = {}
    if any(map(_is_ours, sys.meta_path)):
        finders["sys:meta_path"] = sys.meta_path
    return gone | ours | finders


def _is_ours(value: Any) -> bool:
    """Return True for a function from a file of ours, and for an object of a class of ours."""
    if isinstance(value, partial):
        return _is_ours(value.func)
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_OURS)
    return type(value).__module__.partition(".")[0] == "hf_moe_ep"
