"""Override the forward of single modules by a subclass of their class.

    override_forward([layer], run)     layer(x) now calls run(stock, layer, x), where
                                       stock(layer, x) is the forward that the layer had before

An attribute `forward` of the instance would not be enough, for two reasons. Transformers 5.24
checkpoints a layer in a wrapper around the forward of its class (5.19 does so in `__call__`). An
attribute of the instance would bypass this wrapper, but the forward of a subclass gets a wrapper of
its own. And torch.compile compares the identity of functions that it finds on instances, so it
would compile a layer again for each instance. All layers of a class share one subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_moe_ep.moe.shared_experts import SharedExperts
from hf_moe_ep.upstream.compiler import is_wrapper_of_layers

# The attribute of our subclasses that holds the stock class.
_STOCK_CLASS = "_hf_moe_ep_stock_class"


def override_forward(modules: Iterable[nn.Module], run: Callable[..., Any]) -> None:
    """Make every module call `run(stock_forward, module, *args, **kwargs)`."""
    subclasses: dict[type, type] = {}
    for module in modules:
        kind = type(module)
        if kind not in subclasses:
            subclasses[kind] = _create_subclass(kind, run)
        module.__class__ = subclasses[kind]


def exclude_from_tracing(modules: Iterable[nn.Module]) -> None:
    """Make torch.compile call every module as a whole, with its hooks, and trace none of them."""
    subclasses: dict[type, type] = {}
    for module in modules:
        kind: Any = type(module)
        if kind not in subclasses:
            call = torch.compiler.disable(kind.__call__)
            subclasses[kind] = _subclass_of(kind, {"__call__": call})
        module.__class__ = subclasses[kind]


def restore_classes(model: nn.Module) -> None:
    """Undo `override_forward` and `exclude_from_tracing` in a model that is not sharded."""
    for module in model.modules():
        stock = vars(type(module)).get(_STOCK_CLASS)
        if stock is not None:
            module.__class__ = stock


def get_inner_forward(kind: type) -> Callable[..., Any]:
    """Return the forward of a class without our own and transformers' decorators of layers.

    Each call returns a function with a new code object, because torch.compile counts recompilations
    per code object, and two kinds of layers may share the forward of their class.
    """
    function: Any = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    while _is_ours(function) or is_wrapper_of_layers(function):
        function = function.__wrapped__
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def check_class_forward(name: str, module: nn.Module) -> None:
    """Raise ValueError if another library has set the forward of `module`."""
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(getattr(forward, "__self__", None), SharedExperts):
        raise ValueError(
            f"the forward of {name} ({type(module).__name__}) was replaced by another library, so "
            f"it cannot be compiled; leave out this replacement, or leave out compile_layers"
        )


def _create_subclass(kind: Any, run: Callable[..., Any]) -> type:
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(stock, self, *args, **kwargs)

    return _subclass_of(kind, {"forward": forward})


def _subclass_of(kind: Any, attributes: dict[str, Any]) -> type:
    names = ("__module__", "__qualname__", "__doc__")
    same = {name: getattr(kind, name) for name in names}
    return type(kind.__name__, (kind,), same | attributes | {_STOCK_CLASS: kind})


def _is_ours(function: Any) -> bool:
    return getattr(function, "__globals__", {}).get("__name__") == __name__
