"""Every MoE type of Transformers, patched, equals stock: in one process, and on 2 ranks at ep 2.

Tiny models with every kind of layer that their type has, sizes that tell swapped axes, weights in
fp64; loss, every gradient, their norm and one step of AdamW. The reference is stock on the batches
of all ranks, one after the other.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures import (
    FAMILIES,
    MODEL_TYPES,
    batch,
    record_refusal,
    recording,
    tiny,
    tiny_config,
)
from support.checks import Check, Found
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.parity import full_tensor
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_, patch, unpatch

# Their gate, or the norm behind their experts, computes in fp32, whatever it is given.
FP32_GATE = {"beam", "muse_spark"}
# Their eager experts add up in fp32; transformers' batched ones are stock as well, and do not.
BATCHED = {"nemotron_h", "openai_privacy_filter"}
# Their forward returns a part of the logits: a view, which nobody here changes in place.
CUT_LOGITS = {
    "ernie4_5_vl_moe",
    "inkling_mm_model",
    "inkling_text",
    "openai_privacy_filter",
}
REFUSED = {
    "diffusion_gemma": "its encoder and its decoder share",
    "inkling2": "the gate of Inkling2Experts",
    "inkling2_text": "the gate of Inkling2Experts",
}
TRAINED = [name for name in MODEL_TYPES if name not in REFUSED]
# The load-balancing loss is one of the whole batch, not of a rank's: a test of its own.
NO_AUX_LOSS = {"output_router_logits": False}


def build(model_type: str, seed: int = 0) -> nn.Module:
    """A tiny model without a load-balancing loss."""
    text = tiny_config(model_type).get_text_config()
    options: dict[str, Any] = NO_AUX_LOSS if hasattr(text, "output_router_logits") else {}
    if model_type in BATCHED:
        options = {**options, "experts_implementation": "batched_mm"}
    return tiny(model_type, seed=seed, **options)


def loss_of_sum(model: nn.Module, inputs: dict[str, Tensor], num_tokens: Tensor) -> Tensor:
    """A loss of which those of all ranks make the sum; a fixed weighted sum where stock has none.

    Models without a language modelling head, and those whose loss is always a mean.
    """
    if type(model).__name__.removeprefix("FSDP").endswith(("CausalLM", "ConditionalGeneration")):
        loss: Tensor = model(**inputs, num_items_in_batch=num_tokens).loss
        return loss
    output = model(**{name: value for name, value in inputs.items() if name != "labels"})
    found: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    weights = torch.arange(found.numel(), dtype=found.dtype).sin().view_as(found)
    return (found * weights).sum() / num_tokens


def batches(model: nn.Module, world: int) -> list[dict[str, Any]]:
    """Another number of rows and another length on every rank."""
    return [batch(model, 1 + rank, 8 + 3 * rank, seed=rank) for rank in range(world)]


def assert_equals_stock(
    model_type: str, shard: Callable[[nn.Module], Any], rank: int = 0
) -> list[float]:
    """Compare a step of `shard(model)`, with rank 0's weights, with that of stock: the errors."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    budget = FP32_INSIDE if model_type in FP32_GATE else FP64_MODEL
    model, stock = build(model_type, seed=rank), build(model_type)
    shard(model)
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, stock)]
    everyone = batches(stock, world)
    num_tokens = sum(b["labels"][:, 1:].ne(-100).sum() for b in everyone)
    loss = loss_of_sum(model, everyone[rank], num_tokens)
    (loss * world).backward()
    wanted = [loss_of_sum(stock, inputs, num_tokens) for inputs in everyone]
    torch.stack(wanted).sum().backward()
    errors = [assert_close(f"{model_type}: loss", loss, wanted[rank], budget)]
    pairs = {n: (p, dict(model.named_parameters())[n]) for n, p in stock.named_parameters()}
    for name, (want, got) in pairs.items():
        grad = full_tensor(got.grad)
        if want.grad is None or grad is None:
            # Experts without a token have zeros in stacked weights, whoever computes them.
            other = want.grad if grad is None else grad
            assert other is None or not other.any(), f"{model_type}: one gradient of {name}"
            continue
        errors.append(assert_close(f"{model_type}: grad of {name}", grad, want.grad, budget))
    norm = clip_grad_norm_(model, 0.5) if world > 1 else _clip(model)
    errors.append(assert_close(f"{model_type}: norm", norm, _clip(stock), budget))
    for optimizer in steps:
        optimizer.step()
    # AdamW divides a gradient by its own size: see support/parity.py.
    budget = budget if budget == FP64_MODEL else 100 * budget
    for name, (want, got) in pairs.items():
        errors.append(
            assert_close(f"{model_type}: {name} after a step", full_tensor(got), want, budget)
        )
    return errors


def _clip(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _some_slow(model_types: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)
        for name in model_types
    ]


@pytest.mark.parametrize("model_type", _some_slow(TRAINED))
def test_patched_in_one_process(model_type: str) -> None:
    """A patched model that nobody shards equals stock."""
    assert_equals_stock(model_type, patch)


@pytest.mark.parametrize("model_type", _some_slow(TRAINED))
def test_unpatched_is_stock_again(model_type: str) -> None:
    """Bit for bit, with no attribute or hook of ours left."""
    model, stock = build(model_type), build(model_type)
    (inputs,) = batches(stock, 1)
    num_tokens = inputs["labels"].ne(-100).sum()
    unpatch(patch(model))
    losses = [loss_of_sum(m, inputs, num_tokens) for m in (model, stock)]
    assert torch.equal(*losses), f"{losses[0]} and {losses[1]}"
    for module, original in zip(model.modules(), stock.modules(), strict=True):
        assert vars(module).keys() == vars(original).keys(), type(module).__name__
        assert not module._forward_hooks and not module._forward_pre_hooks


def _on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with recording(model_type, "ep") as errors:
        errors += assert_equals_stock(model_type, partial(apply_ep_fsdp2, ep_size=2), rank)


TWO_RANKS = [
    Check(name, 2, partial(_on_two_ranks, name), slow=name not in FAMILIES).as_parameter()
    for name in TRAINED
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_on_two_ranks_at_ep_2(found: Found, claim: Check) -> None:
    """Experts split over ep, everything sharded, weights of rank 0."""
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name(model_type: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[model_type]) as raised:
        patch(build(model_type))
    record_refusal(model_type, "ep", str(raised.value))
