"""Build tiny models of every type with random adapters on their experts (`build_adapted`)."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from support.adapters import expert_matrices
from support.architectures.steps import build

# Linear layers that PEFT cannot adapt: o_a_proj is a grouped product, a kernel reads the weight of
# out_proj without a call of its forward, and routers return several values.
NOT_BY_PEFT = {
    "deepseek_v4": ["o_a_proj"],
    "llama4_text": ["router"],
    "nemotron_h": ["out_proj"],
    "phimoe": ["router"],
}


def build_adapted(model_type: str, seed: int) -> PeftModel:
    """Build a model with random adapters on its experts and all of its linear layers."""
    model = build(model_type)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_parameters=expert_matrices(model),
        target_modules="all-linear",
        exclude_modules=NOT_BY_PEFT.get(model_type),
        init_lora_weights=False,
    )
    return get_peft_model(model, config)
