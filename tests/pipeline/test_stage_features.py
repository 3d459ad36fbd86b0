"""Counts, correction biases and Muon of a model with stages equal those of one process."""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.parity import full_tensor
from support.stages import four_layers, rows_of, state_of
from torch import nn

from hf_moe_ep import (
    Muon,
    apply_ep_fsdp2,
    data_parallel_rank,
    data_parallel_size,
    expert_load,
    global_token_count,
    patch,
    update_router_bias,
)

ONE_PROCESS: dict[str, Any] = {"experts_backend": "torch", "fused_loss": True}


def step(model: nn.Module, reference: nn.Module, number: int) -> None:
    """Compute the gradients of one step of both models, for the batches of all data ranks."""
    size, rank = data_parallel_size(model), data_parallel_rank(model)
    batches = [rows_of(5)(reference, other, number)[0] for other in range(size)]
    count = global_token_count(model, batches[rank]["labels"])
    with FP64():
        (model(**batches[rank], num_items_in_batch=count).loss * size).backward()
        for rows in batches:
            reference(**rows, num_items_in_batch=count).loss.backward()


def counts_every_token_once(sizes: dict[str, Any], rank: int, world: int) -> None:
    model = apply_ep_fsdp2(four_layers(rank, mlp_only_layers=[0]), **sizes)
    # With a fused loss one process leaves out padding tokens, as stages and ep groups do.
    reference = patch(four_layers(0, mlp_only_layers=[0]), **ONE_PROCESS)
    step(model, reference, 0)
    got, want = expert_load(model), expert_load(reference)
    assert got.layers == want.layers == tuple(f"model.layers.{i}.mlp.experts" for i in (1, 2, 3))
    assert torch.equal(got.counts, want.counts)
    assert expert_load(model).counts.sum() == 0, "the counts were reset"


def biases_follow_the_load(rank: int, world: int) -> None:
    options: dict[str, Any] = {"bias_update_rate": 0.1}
    model = apply_ep_fsdp2(build("deepseek_v3", seed=rank), pp_size=2, **options)
    reference = patch(build("deepseek_v3"), **ONE_PROCESS, **options)
    for number in range(2):
        step(model, reference, number)
        update_router_bias(model)
        update_router_bias(reference)
    wanted = {name: x for name, x in reference.named_buffers() if "bias" in name}
    own = {name: x for name, x in model.named_buffers() if name in wanted}
    assert own and all(x.abs().max() > 0 for x in own.values())
    for name, bias in own.items():
        assert torch.equal(bias, wanted[name]), name


def muon_trains_every_matrix(rank: int, world: int) -> None:
    config = {"tie_word_embeddings": True}
    model = apply_ep_fsdp2(four_layers(rank, **config), pp_size=2, ep_size=world // 2)
    reference = patch(four_layers(0, **config), **ONE_PROCESS)
    optimizers = [Muon(x, 1e-2) for x in (model, reference)]
    for number in range(2):
        step(model, reference, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    aliases, wanted = state_of(model).stage.aliases, dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        name = aliases.get(name, name)
        assert_close(name, full_tensor(parameter.detach()), wanted[name], FP64_MODEL)


TWO_RANKS = {"counts": partial(counts_every_token_once, {"pp_size": 2})}
SLOW_TWO_RANKS = {"biases": biases_follow_the_load}
FOUR_RANKS = {
    "counts, ep 2": partial(counts_every_token_once, {"pp_size": 2, "ep_size": 2}),
    "counts, ep_fsdp 2": partial(counts_every_token_once, {"pp_size": 2}),
    "Muon": muon_trains_every_matrix,
}


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, TWO_RANKS),
        *on_ranks(2, SLOW_TWO_RANKS, slow=True),
        *on_ranks(4, FOUR_RANKS, slow=True),
    ],
)
def test_features_of_stages(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
