"""Attach LoRA to stacked experts and to attention with PEFT, as a user would."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationMixin

from support.architectures.parts import parts_of

if TYPE_CHECKING:
    from peft import PeftModel

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ATTENTION = ("q_proj", "v_proj")

# Name -> arguments of `with_lora` that put adapters on experts, on attention, on both, or on one
# projection of layer 2 alone.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "both": {},
    "experts": {"modules": ()},
    "attention": {"parameters": ()},
    "a layer": {"parameters": (), "modules": ("layers.2.self_attn.q_proj",)},
}


def expert_matrices(model: nn.Module) -> list[str]:
    """Return the names of the experts' stacked matrices, as PEFT's target_parameters need them."""
    parts = parts_of(model)
    return [
        f"{name}.{weight}"
        for name, experts in parts.experts.items()
        for weight in parts.plan.expert_weights
        if getattr(experts, weight).ndim == 3
    ]


def with_lora(
    model: nn.Module,
    r: int = 8,
    parameters: tuple[str, ...] = EXPERTS,
    modules: tuple[str, ...] = ATTENTION,
    seed: int | None = None,
    fp32: bool = True,
    **options: Any,
) -> "PeftModel":
    """Attach adapters with random factors to a model, with the task type that people write.

    PEFT initialises lora_B with zeros. Then lora_A would have no gradient in the first step.
    """
    # A GPU machine may have no PEFT, and its tests import this module.
    from peft import LoraConfig, get_peft_model

    if seed is not None:
        torch.manual_seed(seed)
    if isinstance(model, GenerationMixin):
        options.setdefault("task_type", "CAUSAL_LM")
    config = LoraConfig(
        r=r,
        lora_alpha=2 * r,
        target_parameters=list(parameters),
        target_modules=list(modules),
        init_lora_weights=False,
        **options,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=fp32)
