"""A layer that gradient checkpointing recomputes chooses the same experts, on 2 ranks at ep 2.

A router may choose by topk over experts, over groups of experts first, or over experts and one more
entry that skips the layer. It may also use a table of token ids, or draw a random sample (PhiMoE).
In JetMoE attention has experts of its own, which are chosen by a topk of the same sizes.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.steps import (
    CUT_LOGITS,
    TEXT_FAMILIES,
    adamw,
    assert_same_step,
    build,
)
from support.checks import Check, Found
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_moe_ep import apply_ep_fsdp2

# The routers of these types do not choose by topk over experts only. Both kinds of checkpointing
# are tested.
OTHER_ROUTERS: dict[str, dict[str, Any]] = {
    "phimoe": {"router_jitter_noise": 0.3},  # with noise, the router draws a sample
    "deepseek_v4": {},
    "zaya": {},
    "inkling_text": {},
    "llama4_text": {},
    "longcat_flash": {},
}
# Stock has no gradient checkpointing for this type, so torch's wrapper checkpoints its layers. With
# a reentrant wrapper, stock itself computes other gradients.
WRAPPED = ("jetmoe",)


def _check_step(model_type: str, use_reentrant: bool, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    options = OTHER_ROUTERS.get(model_type, {})
    model, stock = build(model_type, seed=rank, **options), build(model_type, **options)
    if model_type in WRAPPED:
        layers = model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = adamw(model), adamw(stock)
    assert_same_step(model_type, (model, stock), optimizers)


CHECKS = [
    Check(
        f"{name}, {'reentrant' if use_reentrant else 'not reentrant'}",
        2,
        partial(_check_step, name, use_reentrant),
        slow=True,
    ).as_parameter()
    for name in [*OTHER_ROUTERS, *TEXT_FAMILIES, *WRAPPED]
    for use_reentrant in ((False, True) if name in OTHER_ROUTERS else (False,))
]


@pytest.mark.parametrize("claim", CHECKS)
def test_a_checkpointed_step_on_two_ranks_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
def test_the_router_of_phimoe_draws_a_sample() -> None:
    """With this noise the router does not choose the largest scores."""
    model = build("phimoe", **OTHER_ROUTERS["phimoe"])
    ids = torch.arange(40).view(2, 20)
    outputs = []
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.register_forward_hook(lambda _, __, out: outputs.append(out))
    model(input_ids=ids)
    assert any((logits.topk(2)[1][:, :1] != chosen[:, :1]).any() for logits, _, chosen in outputs)
