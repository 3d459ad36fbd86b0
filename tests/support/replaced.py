"""Compare the namespaces of other packages before and after a script uses hf_moe_ep.

`collect_functions()` lists every function and class that is an attribute of a module, or of a class
that the module defines. `find_replaced(before)` then returns the attributes that are gone or hold
code of ours, also in modules that were imported later, and our import finders in `sys.meta_path`.
Changes that the packages make themselves are ignored: torch._dynamo replaces functions of
torch.optim.
"""

import sys
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hf_moe_ep

PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
_OURS = str(Path(hf_moe_ep.__file__).parent)


def collect_functions() -> dict[str, Any]:
    """Return a dict: "module:name" or "module:Class.name" -> the function or class of this name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    function = getattr(
                        inner, "__func__", inner
                    )  # a static or class method wraps it
                    if isinstance(function, FunctionType):
                        found[f"{name}:{attribute}.{member}"] = function
    return found


def find_replaced(before: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that the module docstring describes, with their current values."""
    now = collect_functions()
    names = before.keys() - now.keys()
    # A class that is gone is counted once, without its members.
    gone: dict[str, Any] = {n: None for n in names if n.rpartition(".")[0] not in names}
    ours = {name: value for name, value in now.items() if _is_ours(value)}
    finders: dict[str, Any] = {}
    if any(map(_is_ours, sys.meta_path)):
        finders["sys:meta_path"] = sys.meta_path
    return gone | ours | finders


def _is_ours(value: Any) -> bool:
    """Return True for a function from our files, and for an object of one of our classes."""
    if isinstance(value, partial):
        return _is_ours(value.func)
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_OURS)
    return type(value).__module__.partition(".")[0] == "hf_moe_ep"
