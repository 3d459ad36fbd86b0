"""Read and change private attributes of torch.nn.Module (torch/nn/modules/module.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def get_own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of the buffers of `module` itself; callers may change it."""
    return module._buffers


def get_own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of the children of `module` itself; callers may change it."""
    return module._modules


def get_own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of the parameters of `module` itself; callers may change it."""
    return module._parameters


def get_own_child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the child that `module` itself registered under `name`, or None."""
    return module._modules.get(name)


def find_name_of_child(module: nn.Module, child: nn.Module | None) -> str | None:
    """Return the name under which `module` itself registered `child`, or None."""
    return next((name for name, x in module._modules.items() if x is child and x is not None), None)


def is_compiled(module: nn.Module) -> bool:
    """Return True if `module.compile()` was called, or `module` is the result of torch.compile."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled() -> bool:
    """Return True if torch.compile traces the caller, or compiled code has called the caller.

    If torch.compile could not trace a function, compiled code calls the function uncompiled
    (torch/_dynamo/eval_frame.py).
    """
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return torch.compiler.is_compiling() or callback() is not None


def list_pre_forward_hooks(module: nn.Module) -> list[object]:
    """Return the pre-forward hooks of `module`, in the order in which they run."""
    return list(module._forward_pre_hooks.values())


def list_forward_hooks(module: nn.Module) -> list[object]:
    """Return the pre-forward hooks and the forward hooks of `module`."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


class CheckpointedFunction:
    """Base class of the objects that replace a method of a module in activation checkpointing.

    LLaMA-Factory's checkpointing function looks at the parameters of `function.__self__`, or of
    `function.func.__self__` (llamafactory/model/model_utils/checkpointing.py).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def __self__(self) -> Any:
        """The module whose method is replaced."""
        function = self._function
        while isinstance(function, partial):
            function = function.func
        return function.__self__  # type: ignore[attr-defined]


def list_hooks_on_output(module: nn.Module) -> list[object]:
    """Return the forward hooks of `module` and the hooks on the gradient of its output."""
    by_kind = (module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in by_kind for hook in hooks.values()]


def list_gradient_hooks(module: nn.Module) -> list[object]:
    """Return the hooks that `Tensor.register_hook` has set on plain parameters of `module`.

    The parameters of an FSDP2 unit are DTensors. autograd never runs the hooks of these DTensors,
    because FSDP2 sets their gradients itself.
    """
    plain = (p for p in module.parameters() if not isinstance(p, DTensor))
    return [hook for p in plain for hook in (p._backward_hooks or {}).values()]


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if backward hooks or backward pre-hooks, also global ones, run for `module`."""
    torch_globals = vars(torch.nn.modules.module)
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or torch_globals["_global_backward_hooks"]
        or torch_globals["_global_backward_pre_hooks"]
    )


def remove_hooks(module: nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Remove the forward and pre-forward hooks of `module` for which `is_ours` is true."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make `module(...)` return `call(stock, ...)`; `stock(...)` runs the module with its hooks."""
    stock = partial(nn.Module._call_impl, module)
    setattr(module, "_call_impl", partial(call, stock))  # noqa: B010  mypy: no such field


def explain_moves(
    module: nn.Module,
    replace: Callable[[nn.Module, str, Any], None],
    explain: Callable[[], Exception],
) -> None:
    """Make `to` and `cuda` of a module with tensors on meta raise the error that `explain` returns.

    Tensors on meta have no values, so PyTorch cannot move them to a device. This function calls
    `replace(module, name, value)` to set an attribute.
    """
    replace(module, "_apply", partial(_apply_or_explain, module, explain))


def keep_dtypes(
    module: nn.Module, replace: Callable[[nn.Module, str, Any], None], names: Collection[str]
) -> None:
    """Make `to(dtype)` of the module, or of a model around it, keep the dtypes of some tensors.

    `names` are the names of these parameters and buffers in `module`. Moves to another device still
    move them. This function calls `replace(module, name, value)` to set an attribute.
    """
    replace(module, "_apply", partial(_apply_and_keep_dtypes, module, names))


def _apply_and_keep_dtypes(
    module: nn.Module, names: Collection[str], function: Callable[[Tensor], Tensor], *args: Any
) -> Any:
    def apply(tensor: Tensor) -> Tensor:
        changed = function(tensor)
        own = (module._parameters, module._buffers)
        is_kept = any(tensor is tensors.get(name) for tensors in own for name in names)
        if is_kept and not tensor.is_meta:
            return tensor.to(changed.device)
        return changed

    return type(module)._apply(module, apply, *args)


def _apply_or_explain(
    module: nn.Module,
    explain: Callable[[], Exception],
    function: Callable[[Tensor], Tensor],
    *args: Any,
) -> nn.Module:
    """Call the class's `_apply`, with which `to` and `cuda` move tensors, and explain its error."""
    try:
        return type(module)._apply(module, function, *args)
    except NotImplementedError as error:
        raise explain() from error


def allocate_meta(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised memory on `device` for all tensors on meta, also inside DTensors."""
    model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
