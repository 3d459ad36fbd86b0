"""LoRA on the experts of every type equals stock PEFT on a stock model in one process.

Adapters are on each stacked matrix of the experts and on every linear layer outside of experts.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import expert_matrices
from support.architectures import recording
from support.architectures.steps import (
    CUT_LOGITS,
    TEXT_TYPES,
    adamw,
    assert_same_step,
    budget_of,
    build,
)
from support.checks import Check, Found

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.architectures import find_parts

# gpt_oss has transposed experts with biases, nemotron_h has experts without a gate.
IN_FAST_SUITE = ("gpt_oss", "nemotron_h")
# Linear layers that PEFT cannot adapt: o_a_proj is a grouped product, a kernel reads the weight of
# out_proj without a call of its forward, and router returns three values.
NOT_BY_PEFT = {"deepseek_v4": ["o_a_proj"], "nemotron_h": ["out_proj"], "phimoe": ["router"]}


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


def _on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    model, stock = build_adapted(model_type, seed=rank), build_adapted(model_type, seed=0)
    trained = [name for name, p in stock.named_parameters() if p.requires_grad]
    assert any("experts" in name for name in trained), trained
    apply_ep_fsdp2(model, ep_size=2)
    optimizers: Any = adamw(model), adamw(stock)
    with recording(model_type, "lora") as errors:
        budget = budget_of(model_type)
        errors += assert_same_step(model_type, (model, stock), optimizers, budget)


CHECKS = [
    Check(name, 2, partial(_on_two_ranks, name), slow=name not in IN_FAST_SUITE).as_parameter()
    for name in TEXT_TYPES
]


@pytest.mark.parametrize("claim", CHECKS)
def test_adapters_on_two_ranks_at_ep_2(found: Found, claim: Check) -> None:
    """Compare losses, the gradient of every factor and one step of AdamW."""
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["phimoe"])
def test_a_model_with_adapters_has_the_plan_of_its_base(model_type: str) -> None:
    """If the router is a linear layer, a factor of its adapter looks like a router, too."""
    model = build(model_type)
    plan = find_parts(model).plan
    config = LoraConfig(r=3, target_modules=["router", "q_proj"], init_lora_weights=False)
    assert find_parts(get_peft_model(model, config)).plan == plan
