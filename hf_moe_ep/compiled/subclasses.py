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
from typing import Any

import torch
from torch import nn

from hf_moe_ep.moe.shared_experts import SharedExperts
from hf_moe_ep.upstream.compiler import is_wrapper_of_layers

# The attribute of our subclasses that holds the stock class.
_STOCK_CLASS = "_hf_moe_ep_stock_class"


def override_forward(modules: Iterable[nn.Module], run: Callable[..., Any]) -> None:
    """Make every module call `run(stock_forward, module, *args, **kwargs)`.

    `run` must be a function of a module, because pickles of the modules refer to it by name.
    """
    for module in modules:
        module.__class__ = _create_overriding_class(type(module), run)


def exclude_from_tracing(modules: Iterable[nn.Module]) -> None:
    """Make torch.compile call every module as a whole, with its hooks, and trace none of them."""
    for module in modules:
        module.__class__ = _create_untraced_class(type(module))


def restore_classes(model: nn.Module) -> None:
    """Undo `override_forward` and `exclude_from_tracing` in a model that is not sharded."""
    for module in model.modules():
        stock = vars(type(module)).get(_STOCK_CLASS)
        if stock is not None:
            module.__class__ = stock


def get_stock_class(kind: type) -> type:
    """Return the class of which `kind` is a subclass of ours, or `kind` itself."""
    stock: type = getattr(kind, _STOCK_CLASS, kind)
    return stock


def get_inner_forward(kind: type) -> Callable[..., Any]:
    """Return the forward of a class without our own and transformers' decorators of layers."""
    function: Any = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    while _is_ours(function) or is_wrapper_of_layers(function):
        function = function.__wrapped__
    return function


def check_class_forward(name: str, module: nn.Module) -> None:
    """Raise ValueError if another library has set the forward of `module`."""
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(getattr(forward, "__self__", None), SharedExperts):
        raise ValueError(
            f"the forward of {name} ({type(module).__name__}) was replaced by another library, so "
            f"it cannot be compiled; leave out this replacement, or leave out compile_layers"
        )


def _create_overriding_class(kind: Any, run: Callable[..., Any]) -> type:
    return _create_class_of_forward(kind, kind.forward, run)


def _create_untraced_class(kind: Any) -> type:
    return _create_class_of_call(kind, kind.__call__)


@functools.cache
def _create_class_of_forward(kind: Any, stock: Callable[..., Any], run: Callable[..., Any]) -> type:
    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(stock, self, *args, **kwargs)

    return _create_subclass(kind, {"forward": forward}, (_create_overriding_class, kind, run))


@functools.cache
def _create_class_of_call(kind: Any, stock: Callable[..., Any]) -> type:
    call = torch.compiler.disable(stock)
    return _create_subclass(kind, {"__call__": call}, (_create_untraced_class, kind))


def _create_subclass(kind: Any, attributes: dict[str, Any], origin: tuple[Any, ...]) -> type:
    """Create a subclass whose name is that of `kind`.

    Python pickles an instance with the name of its class, which is also the name of the stock
    class. Our instances are pickled with `origin`, the call that returns their class.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        return reduced if type(self) is not subclass else (_create_instance, origin, *reduced[2:])

    names = ("__module__", "__qualname__", "__doc__")
    same: dict[str, Any] = {name: getattr(kind, name) for name in names}
    own = {"__reduce_ex__": reduce, _STOCK_CLASS: kind}
    subclass: type = type(kind.__name__, (kind,), same | own | attributes)
    return subclass


def _create_instance(create_class: Callable[..., Any], *args: Any) -> Any:
    kind = create_class(*args)
    return kind.__new__(kind)


def _is_ours(function: Any) -> bool:
    return getattr(function, "__globals__", {}).get("__name__") == __name__
