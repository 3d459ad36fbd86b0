"""Check that the forwards on which expert parallelism relies are not replaced.

    module        the forward that it must have
    experts       our forward, or transformers' experts interface, which calls our forward
    MoE block     the forward of its class, which calls the experts that the block contains
    attention     with sp_size > 1: transformers' attention interface, which calls our attention

Liger (`use_liger_kernel=True`) binds its own forward to experts modules, before or after `patch`.
Liger's forward does not know experts on other ranks, so our forward is restored; Liger's norms,
rotary embedding and fused linear cross-entropy stay. Any other replacement would compute with
shards, or without this package, so `patch` or the next forward raises an error. A function that
wraps the forward of its module is allowed if this package can find the wrapped forward: in
`__wrapped__`, which `functools.wraps` sets, or among the objects that the function holds.
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
from hf_moe_ep.moe.stacked import StackedExperts
from hf_moe_ep.state import ModelState, PackageHook, ReliedOn
from hf_moe_ep.upstream.replaced_forwards import (
    belongs_to_liger,
    find_class_with_forward,
    get_qualified_name,
    is_computed_by_liger,
    iterate_forward_functions,
    liger_kernels_are_loaded,
)

_logger = logging.getLogger("hf_moe_ep")


def check_forwards(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if a forward was replaced before `patch`, except by Liger."""
    for name, module, is_experts in _list_modules_to_check(parts, state):
        if not is_computed_by_liger(module):
            _check_forward(name, module, _find_expected_forward(module), "before patch()")
        if not is_experts:
            _check_class(name, module)


def _find_expected_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, or the forward that an earlier `patch` has set.

    `patch` sets the forward of a MoE block whose plan describes it (`MoEBlock.forward`).
    """
    for experts in module.children():
        if isinstance(experts, StackedExperts) and "forward" in vars(module):
            return experts.description.forward or type(module).forward
    return type(module).forward


def record_forwards(parts: Parts, state: ModelState) -> None:
    """Replace Liger's forward of experts by ours, and record the forward of every module."""
    for name, module, is_experts in _list_modules_to_check(parts, state):
        if is_experts and is_computed_by_liger(module):
            state.replace(module, "forward", MethodType(moe_forward, module))
        state.relied_on.append(
            ReliedOn(name, module, next(iterate_forward_functions(module)), is_experts)
        )


def keep_forwards(state: ModelState) -> None:
    """Restore our forward of experts where Liger has replaced it since `patch`.

    Raises:
        ValueError: a forward was replaced, but not by Liger.
    """
    restored = []
    for entry in state.relied_on:
        # This test runs in every forward of the model. Usually the first function matches.
        if entry.function in iterate_forward_functions(entry.module):
            continue
        if not (entry.is_experts and belongs_to_liger(_find_innermost(entry.module))):
            _check_forward(entry.name, entry.module, entry.function, "since patch()")
        state.replace(entry.module, "forward", MethodType(moe_forward, entry.module))
        entry.function = moe_forward
        restored.append(entry.name)
    if restored:
        _logger.info(
            "Liger had replaced the forward of %s and of %d more experts modules; hf_moe_ep's "
            "forward is restored there, and Liger's other kernels stay",
            restored[0],
            len(restored) - 1,
        )


class KeepForwards(PackageHook):
    """Pre-forward hook of the root: calls `keep_forwards`, and checks once if Liger can run."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self._looked_for_liger = False

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return  # sharding has checked the forwards; a compiled forward does not change
        keep_forwards(self.state)
        if not self._looked_for_liger:
            meshes = self.state.meshes
            # FSDP2 may offload parameters to the CPU; the mesh has the device that computes.
            device = next(root.parameters()).device if meshes is None else meshes.device
            _check_liger_can_run(root, device)
            self._looked_for_liger = True


def _check_liger_can_run(root: nn.Module, device: torch.device) -> None:
    """Raise ValueError if Liger's kernels would run on a CPU, for which Triton cannot compile."""
    if device.type != "cpu" or not liger_kernels_are_loaded() or _triton_is_interpreted():
        return
    for name, module in root.named_modules():
        if is_computed_by_liger(module):
            raise ValueError(
                f"Liger computes {name or type(module).__name__} "
                f"({get_qualified_name(_find_innermost(module))}), and its kernels need a "
                f"GPU, while this model is on the CPU; leave out use_liger_kernel=True, and "
                f"everything else that applies Liger"
            )


def _triton_is_interpreted() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from hf_moe_ep.ops import triton_mlp

    return triton_mlp.interpreted()


def _list_modules_to_check(
    parts: Parts, state: ModelState
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, is_experts) of every module whose forward must not be replaced."""
    if state.config.experts_backend != "eager":
        experts = {id(module) for module in parts.experts.values()}
        blocks = {
            id(child): (name, module)
            for name, module in parts.root.named_modules()
            for child in module.children()
            if id(child) in experts
        }
        for name, module in parts.experts.items():
            yield name, module, True
            yield *blocks[id(module)], False
    if state.config.ranks_per_batch > 1:
        for index, module in enumerate(parts.attention):
            yield f"{type(module).__name__} {index}", module, False


def _check_class(name: str, module: nn.Module) -> None:
    """Raise ValueError if another file has replaced the forward of a module's class.

    A class from another file may replace the whole class of a module. It then defines its own
    forward, and is allowed.
    """
    owner, function = find_class_with_forward(module)
    if function.__module__ != owner.__module__:
        raise ValueError(
            f"the forward of {get_qualified_name(owner)}, the class of {name}, was replaced before "
            f"patch() by {get_qualified_name(function)}, which may compute without hf_moe_ep; "
            f"leave out this replacement, or let it call the original forward under functools.wraps"
        )


def _check_forward(name: str, module: nn.Module, expected: Callable[..., Any], when: str) -> None:
    if expected not in iterate_forward_functions(module):
        raise ValueError(
            f"the forward of {name} ({type(module).__name__}) was replaced {when} by "
            f"{get_qualified_name(_find_innermost(module))}, which would compute without "
            f"hf_moe_ep; leave out this replacement (use_kernels=True, kernelize, a patcher), or "
            f"wrap {get_qualified_name(expected)} instead of replacing it"
        )


def _find_innermost(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module without the functions that wrap it."""
    return list(iterate_forward_functions(module))[-1]
