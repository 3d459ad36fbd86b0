"""What torch.nn.Module keeps under private names (torch/nn/modules/module.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of the module's own buffers, not its children's; callers may write."""
    return module._buffers


def own_children(module: nn.Module) -> Iterable[nn.Module | None]:
    """Return the children that `module` itself registered.

    `getattr` would not do: PEFT's wrappers answer it with attributes of what they wrap.
    """
    return module._modules.values()


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the child that `module` itself registered under `name`, or None."""
    return module._modules.get(name)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was called on a module, or wraps one (torch/_dynamo/)."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled() -> bool:
    """Return whether torch.compile traces what runs now, or called it.

    Code that it could not trace runs as it is, and what that calls may be compiled again
    (torch/_dynamo/eval_frame.py).
    """
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return torch.compiler.is_compiling() or callback() is not None


def pre_forward_hooks(module: nn.Module) -> list[object]:
    """Return the pre-forward hooks of `module`, in the order in which they run."""
    return list(module._forward_pre_hooks.values())


def remove_hooks(module: nn.Module, is_ours: Callable[[object], bool]) -> None:
    """Remove the forward and pre-forward hooks of `module` for which `is_ours` is true."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_hooks_with_kwargs.pop(key, None)


def allocate_meta(model: nn.Module, device: torch.device) -> None:
    """Give memory on `device`, not filled, to all that is on meta, shards of DTensors too."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
