"""What torch.nn.Module keeps under private names (torch/nn/modules/module.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of one module, not of its children; the dictionary itself, to write to."""
    return module._buffers


def own_children(module: nn.Module) -> Iterable[nn.Module | None]:
    """The children that a module registered; wrappers of PEFT pass other attributes through."""
    return module._modules.values()


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """The child that a module registered under `name`."""
    return module._modules.get(name)


def remove_hooks(module: nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Take the forward hooks of a module off again that `is_ours` knows."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)


def allocate_meta(model: nn.Module, device: torch.device) -> None:
    """Memory on `device` for what is on the meta device, shards of DTensors too; not filled."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
