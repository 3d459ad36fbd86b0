"""LoRA on the experts of every type equals stock PEFT on a stock model in one process.

Adapters are on each stacked matrix of the experts and on every linear layer outside of experts.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import record_refusal, recording
from support.architectures.adapted import build_adapted
from support.architectures.steps import (
    CUT_LOGITS,
    TEXT_TYPES,
    WITHOUT_ADAPTERS,
    adamw,
    assert_same_step,
    batches,
    build,
    exactly,
)
from support.checks import Check, Found

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.architectures import find_parts

# gpt_oss has transposed experts with biases, nemotron_h has experts without a gate.
IN_FAST_SUITE = ("gpt_oss",)


def _check_adapters_on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with recording(model_type, "lora") as errors, exactly(model_type):
        model, stock = build_adapted(model_type, seed=rank), build_adapted(model_type, seed=0)
        trained = [name for name, p in stock.named_parameters() if p.requires_grad]
        assert any("experts" in name for name in trained), trained
        apply_ep_fsdp2(model, ep_size=2)
        optimizers: Any = adamw(model), adamw(stock)
        errors += assert_same_step(model_type, (model, stock), optimizers)


CHECKS = [
    Check(
        name, 2, partial(_check_adapters_on_two_ranks, name), slow=name not in IN_FAST_SUITE
    ).as_parameter()
    for name in TEXT_TYPES
    if name not in WITHOUT_ADAPTERS
]


@pytest.mark.parametrize("claim", CHECKS)
def test_adapters_on_two_ranks_at_ep_2(found: Found, claim: Check) -> None:
    """Compare losses, the gradient of every factor and one step of AdamW."""
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WITHOUT_ADAPTERS)
def test_experts_without_stacked_weights_have_no_adapters(model_type: str) -> None:
    """Adapters of these experts are refused before and after `patch`."""
    stacked, stock = {
        "dbrx": ("experts.gate_up_proj", "experts.mlp.w1"),
        "jetmoe": ("mlp.experts.down_proj", "mlp.output_linear.weight"),
        "longcat_flash": ("experts.gate_up_proj", "experts.gate_up_proj"),
    }[model_type]
    config = LoraConfig(r=3, target_parameters=[stock], init_lora_weights=False)
    with pytest.raises(ValueError, match="cannot have adapters: hf_moe_ep makes") as raised:
        patch(get_peft_model(build(model_type), config), ep_size=2)
    record_refusal(model_type, "lora", str(raised.value))
    model = patch(build(model_type))
    config = LoraConfig(r=3, target_parameters=[stacked], init_lora_weights=False)
    with pytest.raises(ValueError, match="cannot have adapters"):
        get_peft_model(model, config)


@pytest.mark.slow
def test_adapted_experts_outside_of_the_interface_are_unpatched() -> None:
    """PEFT's wrappers stay around the stock experts, and the losses are equal bit by bit."""
    model, stock = (build_adapted("llama4_text", seed=0) for _ in range(2))
    (inputs,) = batches(stock, 1)
    unpatch(patch(model))
    assert torch.equal(model(**inputs).loss, stock(**inputs).loss)
    kinds = [[(n, type(m)) for n, m in other.named_modules()] for other in (model, stock)]
    assert kinds[0] == kinds[1]


def _check_attention_on_two_ranks(model_type: str, rank: int, world: int) -> None:
    models = []
    for seed in (rank, 0):
        model = build(model_type)
        torch.manual_seed(seed)
        targets = {"dbrx": ["Wqkv", "out_proj"], "jetmoe": ["kv_proj"]}
        config = LoraConfig(
            r=3, target_modules=targets.get(model_type, ["o_proj"]), init_lora_weights=False
        )
        models.append(get_peft_model(model, config))
    apply_ep_fsdp2(models[0], ep_size=2)
    assert_same_step(model_type, (models[0], models[1]), tuple(map(adamw, models)))


WITH_FROZEN_EXPERTS = [
    Check(
        f"{name}, attention", 2, partial(_check_attention_on_two_ranks, name), slow=True
    ).as_parameter()
    for name in WITHOUT_ADAPTERS
]


@pytest.mark.parametrize("claim", WITH_FROZEN_EXPERTS)
def test_adapters_of_attention_train_while_experts_are_frozen(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["phimoe"])
def test_a_model_with_adapters_has_the_plan_of_its_base(model_type: str) -> None:
    """If the router is a linear layer, a factor of its adapter must not count as a router."""
    model = build(model_type)
    plan = find_parts(model).plan
    config = LoraConfig(r=3, target_modules=["router", "q_proj"], init_lora_weights=False)
    assert find_parts(get_peft_model(model, config)).plan == plan
