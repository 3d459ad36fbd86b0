"""LoRA on the experts of every type equals stock PEFT on a stock model in one process.

Adapters are on each stacked matrix of the experts and on every linear layer outside of experts.
"""

import warnings
from functools import partial
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from support.architectures import recording
from support.architectures.adapted import build_adapted
from support.architectures.steps import (
    CUT_LOGITS,
    TEXT_TYPES,
    adamw,
    assert_same_step,
    budget_of,
    build,
    exactly,
)
from support.checks import Check, Found

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.architectures import find_parts

# gpt_oss has transposed experts with biases, nemotron_h has experts without a gate.
IN_FAST_SUITE = ("gpt_oss", "nemotron_h")


def _on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with recording(model_type, "lora") as errors, exactly(model_type):
        model, stock = build_adapted(model_type, seed=rank), build_adapted(model_type, seed=0)
        trained = [name for name, p in stock.named_parameters() if p.requires_grad]
        assert any("experts" in name for name in trained), trained
        apply_ep_fsdp2(model, ep_size=2)
        optimizers: Any = adamw(model), adamw(stock)
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
