"""The forwards that must stay what they were when the model was patched.

    experts       ours, or transformers' experts interface, which calls ours
    MoE block     the module that holds them: it has to call them
    attention     with sp_size > 1: transformers' attention interface, which calls ours

Liger (`use_liger_kernel=True`) binds its own forward to experts, before or after `patch`. It knows
nothing of experts on other ranks, so ours takes its place again; its norms, its rotary embedding
and its fused linear cross-entropy stay. Any other function is named in an error, at the first
forward, as it would compute with shards, or past us. One that wraps the forward of its module, and
says so (`functools.wraps`) or holds it, may stand in front.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.moe.layer import moe_forward
from hf_moe_ep.state import ModelState, Ours, ReliedOn
from hf_moe_ep.upstream.modules import own_children
from hf_moe_ep.upstream.replaced_forwards import (
    class_with_forward,
    forward_functions,
    forward_of_class,
    is_computed_by_liger,
    is_ligers,
    liger_kernels_are_loaded,
    qualified_name,
)

_logger = logging.getLogger("hf_moe_ep")


def check_forwards(parts: Parts, state: ModelState) -> None:
    """Raise where somebody else than Liger has replaced a forward before `patch`."""
    for name, module, is_experts in _relied_on(parts, state):
        if not is_computed_by_liger(module):
            _check(name, module, forward_of_class(module), "before patch()")
        if not is_experts:
            _check_class(name, module)


def rely_on_forwards(parts: Parts, state: ModelState) -> None:
    """Put our forward in the place of Liger's, and note which function computes what."""
    for name, module, is_experts in _relied_on(parts, state):
        if is_experts and is_computed_by_liger(module):
            state.replace(module, "forward", MethodType(moe_forward, module))
        state.relied_on.append(ReliedOn(name, module, next(forward_functions(module)), is_experts))


def keep_forwards(state: ModelState) -> None:
    """Put ours back where Liger has replaced it since.

    Raises:
        ValueError: somebody else has replaced a forward.
    """
    replaced = []
    for one in state.relied_on:
        # Lazily, in every forward of the model: mostly the first function is the one.
        if one.function in forward_functions(one.module):
            continue
        if not (one.is_experts and is_ligers(_innermost(one.module))):
            _check(one.name, one.module, one.function, "since patch()")
        state.replace(one.module, "forward", MethodType(moe_forward, one.module))
        one.function = moe_forward
        replaced.append(one.name)
    if replaced:
        _logger.info(
            "Liger had replaced the forward of %s and %d more experts modules; they stay "
            "hf_moe_ep's, and the rest of Liger stays where it is",
            replaced[0],
            len(replaced) - 1,
        )


class KeepForwards(Ours):
    """Pre-forward hook of the root: `keep_forwards`, and once whether Liger can run here."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self._looked_for_liger = False

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return  # a compiled forward is what it was when sharding looked
        keep_forwards(self.state)
        if not self._looked_for_liger:
            meshes = self.state.meshes
            # Parameters that FSDP2 offloads are on the host, which computes nothing.
            device = next(root.parameters()).device if meshes is None else meshes.device
            _check_liger_can_run(root, device)
            self._looked_for_liger = True


def _check_liger_can_run(root: nn.Module, device: torch.device) -> None:
    """Raise where Liger's kernels would compute on a CPU, for which Triton compiles nothing."""
    if device.type != "cpu" or not liger_kernels_are_loaded() or _triton_is_interpreted():
        return
    for name, module in root.named_modules():
        if is_computed_by_liger(module):
            raise ValueError(
                f"Liger computes {name or type(module).__name__} "
                f"({qualified_name(_innermost(module))}), and its kernels need a "
                f"GPU, while this model is on the CPU; leave out use_liger_kernel=True and "
                f"whatever else applies Liger"
            )


def _triton_is_interpreted() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from hf_moe_ep.ops import triton_mlp

    return triton_mlp.interpreted()


def _relied_on(parts: Parts, state: ModelState) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, whether it is an experts module) of what must call us."""
    if state.config.experts_backend != "eager":
        experts = {id(module) for module in parts.experts.values()}
        blocks = {
            id(child): (name, module)
            for name, module in parts.root.named_modules()
            for child in own_children(module)
            if id(child) in experts
        }
        for name, module in parts.experts.items():
            yield name, module, True
            yield *blocks[id(module)], False
    if state.config.sp_size not in (None, 1):
        for index, module in enumerate(parts.attention):
            yield f"{type(module).__name__} {index}", module, False


def _check_class(name: str, module: nn.Module) -> None:
    """Raise where somebody has given the class of a block, or of attention, another forward.

    A class of somebody's own may take the place of the whole: its forward is in its own file.
    """
    owner, function = class_with_forward(module)
    if function.__module__ != owner.__module__:
        raise ValueError(
            f"the forward of {qualified_name(owner)}, the class of {name}, was replaced before "
            f"patch() by {qualified_name(function)}, which may compute without hf_moe_ep; leave "
            f"out what replaces it, or let it call the original and say so (functools.wraps)"
        )


def _check(name: str, module: nn.Module, wanted: Callable[..., Any], when: str) -> None:
    if wanted not in forward_functions(module):
        raise ValueError(
            f"the forward of {name} ({type(module).__name__}) was replaced {when} by "
            f"{qualified_name(_innermost(module))}, which would compute without hf_moe_ep; leave "
            f"out what replaces it (use_kernels=True, kernelize, a patcher), or keep "
            f"{qualified_name(wanted)} there"
        )


def _innermost(module: nn.Module) -> Callable[..., Any]:
    """Return the function that computes a module, whatever wraps it."""
    return list(forward_functions(module))[-1]
