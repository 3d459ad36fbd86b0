"""Transformers' experts interface (integrations/moe.py): one forward for all experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_IMPLEMENTATION = "hf_moe_ep"


def register_experts_forward(forward: Callable[..., Any]) -> None:
    """Make `forward` selectable by config (transformers/integrations/moe.py)."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, forward)


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module routes its forward through transformers' experts interface."""
    flags = ("is_transposed", "has_bias", "is_concatenated", "has_gate")
    return all(hasattr(module, flag) for flag in flags)


@dataclass(frozen=True)
class ExpertsFlags:
    """What `use_experts_implementation` wrote on an experts module (integrations/moe.py)."""

    is_transposed: bool
    has_bias: bool
    is_concatenated: bool
    has_gate: bool
    has_post_expert_norm: bool


def experts_flags(module: nn.Module) -> ExpertsFlags:
    """The layout flags of an experts module."""
    names = [field.name for field in fields(ExpertsFlags)]
    return ExpertsFlags(**{name: bool(getattr(module, name, False)) for name in names})


def experts_gate(module: Any) -> Callable[[Tensor], Tensor]:
    """From pre-activations to the down projection's input, as the module itself would."""
    return module._apply_gate if module.has_gate else module.act_fn


def experts_gate_constants(module: nn.Module) -> tuple[set[float], set[float]]:
    """Numbers that clamped gates keep on the module: candidates for alpha, and for the limit."""
    alphas, limits = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
    found = vars(module)
    return (
        {float(found[name]) for name in alphas if found.get(name) is not None},
        {float(found[name]) for name in limits if found.get(name) is not None},
    )


def own_experts_config(config: Any, implementation: str) -> Any:
    """A copy of `config` for the experts alone that selects `implementation`.

    Models built from one config object share it, and `model.config` is what gets saved: neither
    may learn of us, so only the experts modules see this copy.
    """
    own = copy.copy(config)
    own._experts_implementation_internal = implementation
    return own
