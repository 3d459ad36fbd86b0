"""Transformers' experts interface (integrations/moe.py): one forward for all experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moe_ep.upstream.replaced_forwards import is_ligers

EXPERTS_IMPLEMENTATION = "hf_moe_ep"


def register_experts_forward(forward: Callable[..., Any]) -> None:
    """Make `forward` an experts implementation that a config can select by our name.

    transformers/integrations/moe.py.
    """
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, forward)


def refuse_experts_implementation(model: Any, implementation: str | dict[str, str]) -> None:
    """Stand for `set_experts_implementation` of a patched model, whose experts are not stock's.

    `generate` passes a dict, to switch to another implementation of stock and back
    (transformers/generation/utils.py); that changes configs which no patched experts read.

    Raises:
        ValueError: one implementation is asked for by its name.
    """
    if isinstance(implementation, str):
        raise ValueError(
            f"set_experts_implementation({implementation!r}): the experts of this "
            f"{type(model).__name__} are computed by hf_moe_ep since patch(), so it would change "
            f"nothing; choose with patch(model, experts_backend=...), or unpatch(model) first"
        )
    type(model).set_experts_implementation(model, implementation)


def models_with_experts_implementation(root: nn.Module) -> list[nn.Module]:
    """Return the models within `root` whose users may choose how experts are computed."""
    return [m for m in root.modules() if hasattr(type(m), "set_experts_implementation")]


def is_experts_module(module: nn.Module) -> bool:
    """Return whether `module` is of transformers' experts interface, or Liger's class for one."""
    if is_experts_class_of_liger(module):
        return True
    flags = ("is_transposed", "has_bias", "is_concatenated", "has_gate")
    return all(hasattr(module, flag) for flag in flags)


def is_experts_class_of_liger(module: nn.Module) -> bool:
    """Return whether Liger built `module` in place of stacked experts.

    liger_kernel/transformers/swiglu.py, LigerExperts.
    """
    return is_ligers(type(module)) and hasattr(module, "gate_up_proj")


@dataclass(frozen=True)
class ExpertsFlags:
    """The flags that `use_experts_implementation` set on an experts module (integrations/moe.py).

    They say how its weights lie and what its formula is made of.
    """

    is_transposed: bool
    has_bias: bool
    is_concatenated: bool
    has_gate: bool
    has_post_expert_norm: bool


def experts_flags(module: nn.Module) -> ExpertsFlags:
    """Return the flags of an experts module; one that it lacks is False."""
    if is_experts_class_of_liger(module):
        return ExpertsFlags(
            is_transposed=False,
            has_bias=False,
            is_concatenated=True,
            has_gate=True,
            has_post_expert_norm=False,
        )
    names = [field.name for field in fields(ExpertsFlags)]
    return ExpertsFlags(**{name: bool(getattr(module, name, False)) for name in names})


def post_expert_norm(module: nn.Module) -> nn.Module | None:
    """Return the norm behind each expert, one for all experts of a module; None without one."""
    norm: nn.Module | None = getattr(module, "post_expert_norm", None)
    return norm


def experts_gate(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from an expert's pre-activations to the input of its down projection.

    The module's own gate where it has one, otherwise its activation function. Liger's experts are
    SwiGLU: they take no other.
    """
    if is_experts_class_of_liger(module):
        return _swiglu
    return module._apply_gate if module.has_gate else module.act_fn


def _swiglu(pre_AG: Tensor) -> Tensor:
    gate, up = pre_AG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def experts_gate_constants(module: nn.Module) -> tuple[set[float], set[float]]:
    """Return two sets of numbers found on the module: candidates for alpha, and for the limit.

    Models with clamped gates keep these two constants under one of several names.
    """
    alphas = ("alpha", "swiglu_alpha")
    limits = ("limit", "swiglu_limit")
    found = vars(module)
    return (
        {float(found[name]) for name in alphas if found.get(name) is not None},
        {float(found[name]) for name in limits if found.get(name) is not None},
    )


def own_experts_config(config: Any, implementation: str) -> Any:
    """Return a copy of `config`, for experts modules alone, that selects `implementation`.

    The original may be shared with other models, and it is what gets saved as `model.config`, so
    it stays as it is.
    """
    own = copy.copy(config)
    own._experts_implementation_internal = implementation
    return own
