"""A patched model of every MoE type equals stock, in one process and on 2 ranks at ep 2.

The tiny models are in fp64 and have every kind of layer of their type. All their sizes differ, so
swapped axes are noticed. The loss, every gradient, the gradient norm and one step of AdamW are
compared with stock, which trains on the batches of all ranks one after the other.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from support.architectures import MODEL_TYPES, few_fast, recording
from support.architectures.steps import (
    CUT_LOGITS,
    adamw,
    assert_same_step,
    batches,
    build,
    count_tokens,
    exactly,
    loss_of_sum,
)
from support.architectures.types import REFUSED_OUTSIDE
from support.checks import Check, Found
from torch import nn

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.architectures import read_differences


def assert_equals_stock(
    model_type: str, shard: Callable[[nn.Module], Any], rank: int = 0
) -> list[float]:
    """Compare a training step after `shard(model)` with stock's step, and return the errors."""
    with exactly(model_type):
        model, stock = build(model_type, seed=rank), build(model_type)
        shard(model)
        optimizers = adamw(model), adamw(stock)
        return assert_same_step(model_type, (model, stock), optimizers)


@pytest.mark.parametrize("model_type", few_fast(MODEL_TYPES))
def test_a_patched_model_equals_stock_in_one_process(model_type: str) -> None:
    """The model is patched but not sharded."""
    assert_equals_stock(model_type, patch)


@pytest.mark.parametrize("model_type", few_fast(MODEL_TYPES))
def test_an_unpatched_model_is_stock_again(model_type: str) -> None:
    """The losses are equal bit by bit, and no attribute or hook of ours is left."""
    model, stock = build(model_type), build(model_type)
    (inputs,) = batches(stock, 1)
    num_tokens = count_tokens([inputs])
    unpatch(patch(model))
    losses = [loss_of_sum(m, inputs, num_tokens) for m in (model, stock)]
    assert torch.equal(*losses), f"{losses[0]} and {losses[1]}"
    for module, original in zip(model.modules(), stock.modules(), strict=True):
        assert vars(module).keys() == vars(original).keys(), type(module).__name__
        assert not module._forward_hooks and not module._forward_pre_hooks


def _check_on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with recording(model_type, "ep") as errors:
        errors += assert_equals_stock(model_type, partial(apply_ep_fsdp2, ep_size=2), rank)


# Latent attention and shared experts, attention sinks, and delta nets with a tower.
FAST = ("deepseek_v3", "gpt_oss", "qwen3_5_moe")
TWO_RANKS = [
    Check(name, 2, partial(_check_on_two_ranks, name), slow=name not in FAST).as_parameter()
    for name in MODEL_TYPES
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_on_two_ranks_at_ep_2(found: Found, claim: Check) -> None:
    """Each rank builds other weights. `apply_ep_fsdp2` shards the weights of rank 0."""
    found.raise_if_failed(claim)


_CLASSES_OUTSIDE = {
    "doge": "DogeForCausalLM",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "vitpose": "VitPoseForPoseEstimation",
}


@pytest.mark.parametrize("model_type", REFUSED_OUTSIDE)
def test_types_outside_of_the_interface_are_refused_with_a_reason(model_type: str) -> None:
    """The model has the default sizes of its config, on the meta device."""
    model_class = getattr(transformers, _CLASSES_OUTSIDE[model_type])
    with torch.device("meta"):
        model = model_class(model_class.config_class())
    with pytest.raises(ValueError, match=r"cannot be patched: its .*6_new_architecture") as raised:
        patch(model, ep_size=2)
    assert read_differences(model_type).refused in str(raised.value)
