"""LongCat-Flash, whose router also chooses experts that return their input, in every dispatcher.

A token may choose experts of both ranks, identity experts, or both. Nothing is sent to identity
experts, and they are not counted.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.steps import (
    adamw,
    assert_same_step,
    batches,
    build,
    count_tokens,
    loss_of_sum,
    whole,
)
from support.architectures.types import INSTALLED
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from torch import Tensor

from hf_moe_ep import RoutingReplay, apply_ep_fsdp2, balance_experts, expert_load, patch

NAME = "longcat_flash"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NAME not in INSTALLED, reason=f"transformers has no {NAME}"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "two nodes": {"dispatcher": "hierarchical", "node_size": 1},
    "chunks": {"dispatch_chunks": 2},
    "recomputed activations": {"recompute_activations": True},
}


def count_choices(model: Any, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Count the choices of each layer of a stock model, including identity experts."""
    counts = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(
            lambda router, _, out: counts.append(
                torch.bincount(out[2].flatten(), minlength=router.n_routed_experts)
            )
        )
    for batch in inputs:
        model(**batch)
    layers = len(model.model.layers)
    return torch.stack(counts).unflatten(0, (-1, layers)).sum(0)


def _check_equals_stock(options: dict[str, Any], rank: int, world: int) -> None:
    model, stock = build(NAME, seed=rank), build(NAME)
    apply_ep_fsdp2(model, ep_size=2, **options)
    assert_same_step(NAME, (model, stock), (adamw(model), adamw(stock)))


def _move_experts(rank: int, world: int) -> None:
    """Loads are stock's counts without identity experts. After a move, the loss equals stock's."""
    model, stock = build(NAME, seed=rank), build(NAME)
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = adamw(model), adamw(stock)
    assert_same_step(NAME, (model, stock), optimizers)
    load = expert_load(model)
    chosen = count_choices(build(NAME), batches(stock, world))
    assert chosen[:, load.counts.shape[1] :].sum() > 0, "no token chose an identity expert"
    assert torch.equal(load.counts, chosen[:, : load.counts.shape[1]])
    moved = balance_experts(model, optimizers[0], load)
    assert moved.slots is not None and (moved.slots != torch.arange(8)).any()
    by_rank = batches(stock, world, seed=5)
    num_tokens = count_tokens(by_rank)
    loss = loss_of_sum(model, by_rank[rank], num_tokens)
    assert_close("loss", loss, loss_of_sum(stock, by_rank[rank], num_tokens), FP64_MODEL)


CHECKS = [
    *(Check(name, 2, partial(_check_equals_stock, options)) for name, options in OPTIONS.items()),
    Check("moved experts", 2, _move_experts),
]


@pytest.mark.parametrize("claim", [check.as_parameter() for check in CHECKS])
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_identity_experts_are_not_counted_in_one_process() -> None:
    model, stock = patch(build(NAME)), build(NAME)
    (inputs,) = batches(stock, 1)
    model(**inputs).loss.backward()
    counts = expert_load(model).counts
    assert torch.equal(counts, count_choices(stock, [inputs])[:, : counts.shape[1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias_update_rate": 0.001}, "has 13 entries, but the layer has 8 experts"),
        ({"experts_backend": "eager"}, "experts_backend='eager' runs the model's own experts"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch(build(NAME), **options)


def test_routing_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="also choose experts that return their input"):
        RoutingReplay(patch(build(NAME)))


def test_unused_weights_get_zeros_as_gradients() -> None:
    """With a gradient of zero, AdamW decays the unused weights as in stock."""
    model, stock = patch(build(NAME)), build(NAME)
    (inputs,) = batches(stock, 1)
    for trained in (model, stock):
        trained(**inputs).loss.backward()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    got, want = whole(model, grads)[name], stock.get_parameter(name).grad
    assert got.shape == want.shape == (13, 48, 40) and not got[8:].any()
    assert_close(name, got, want, FP64_MODEL)
