"""Use transformers' experts interface, in which one forward computes all experts of a layer.

The functions register our forward, select it in a config, and read the layout of an experts module.
The interface is defined in transformers/integrations/moe.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_moe_ep.upstream.frameworks import chooses_no_experts, how_to_compute_experts
from hf_moe_ep.upstream.replaced_forwards import belongs_to_liger

EXPERTS_IMPLEMENTATION = "hf_moe_ep"


def register_experts_forward(forward: Callable[..., Any]) -> None:
    """Register `forward`. A config selects it by the name EXPERTS_IMPLEMENTATION."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, forward)


def refuse_experts_implementation(model: Any, implementation: str | dict[str, str]) -> None:
    """Handle a call of `set_experts_implementation` on a patched model.

    Users call this method with one name. The name would have no effect on patched experts, because
    they have a config of their own. `generate` calls the method with a dict, to select another
    stock implementation until `generate` returns (transformers/generation/utils.py). The call by
    `generate` is passed on to stock's method, and so is a name that no user has chosen.

    Raises:
        ValueError: `implementation` is one name, and a user has chosen it.
    """
    if isinstance(implementation, str) and not chooses_no_experts(implementation):
        raise ValueError(
            f"set_experts_implementation({implementation!r}) would have no effect, because since "
            f"patch() the experts of this {type(model).__name__} are computed by hf_moe_ep; "
            f"{how_to_compute_experts()}"
        )
    type(model).set_experts_implementation(model, implementation)


def is_experts_module(module: nn.Module) -> bool:
    """Return True if `module` uses transformers' experts interface, or is Liger's experts class."""
    if is_experts_class_of_liger(module):
        return True
    flags = ("is_transposed", "has_bias", "is_concatenated", "has_gate")
    return all(hasattr(module, flag) for flag in flags)


def is_experts_class_of_liger(module: nn.Module) -> bool:
    """Return True if `module` is a LigerExperts, Liger's replacement for stock's stacked experts.

    The class is defined in liger_kernel/transformers/swiglu.py.
    """
    return belongs_to_liger(type(module)) and hasattr(module, "gate_up_proj")


@dataclass(frozen=True)
class ExpertsFlags:
    """The flags that `use_experts_implementation` sets on an experts module (integrations/moe.py).

    The flags describe the layout of the module's weights and the formula of an expert.
    """

    is_transposed: bool = False
    has_bias: bool = False
    is_concatenated: bool = False
    has_gate: bool = False
    has_post_expert_norm: bool = False


def get_experts_flags(module: nn.Module) -> ExpertsFlags:
    """Return the flags of an experts module. A missing flag is False."""
    if is_experts_class_of_liger(module):
        return ExpertsFlags(is_concatenated=True, has_gate=True)
    names = [field.name for field in fields(ExpertsFlags)]
    flags = ExpertsFlags(**{name: bool(getattr(module, name, False)) for name in names})
    return replace(flags, is_transposed=flags.is_transposed or hides_transposition(module))


def hides_transposition(module: nn.Module) -> bool:
    """Return True if a module stores transposed matrices, but does not say so by `is_transposed`.

    PEFT reads `is_transposed` to decide which factor of an adapter is which
    (peft/tuners/lora/layer.py, ParamWrapper.update_layer). Stock experts outside of the interface
    have no such attribute, so the modules that replace them (`moe/stacked.py`) have another
    attribute.
    """
    return bool(getattr(module, "stores_transposed", False))


def post_expert_norm(module: nn.Module) -> nn.Module | None:
    """Return the norm that follows the experts, or None. All experts of a layer share the norm."""
    return getattr(module, "post_expert_norm", None)


def get_experts_gate(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that turns an expert's pre-activations into the input of down_proj.

    The function is the gate of the module, or the activation function of a module without a gate.
    Liger's experts always compute SwiGLU.
    """
    if is_experts_class_of_liger(module):
        return _apply_swiglu
    return module._apply_gate if module.has_gate else module.act_fn


def _apply_swiglu(pre_AG: Tensor) -> Tensor:
    gate, up = pre_AG.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def list_gate_constants(module: nn.Module) -> tuple[set[float], set[float]]:
    """Return two sets of numbers: candidates for the alpha and for the limit of a clamped gate.

    Different models store the two constants under different names.
    """

    def numbers(*names: str) -> set[float]:
        values = (vars(module).get(name) for name in names)
        return {float(value) for value in values if value is not None}

    return numbers("alpha", "swiglu_alpha"), numbers("limit", "swiglu_limit") - {math.inf}


def list_gate_caps(module: nn.Module) -> set[float]:
    """Return candidates for the soft caps of a gate: each `softcap` of a module or submodule."""
    caps = (vars(inner).get("softcap") for inner in module.modules())
    return {float(cap) for cap in caps if cap is not None}


def make_experts_config(config: Any, implementation: str) -> Any:
    """Return a copy of `config`, for experts modules only, that selects `implementation`.

    `config` itself is not changed, because other models may share it and because it is saved as
    `model.config`.
    """
    experts_config = copy.copy(config)
    experts_config._experts_implementation_internal = implementation
    return experts_config
