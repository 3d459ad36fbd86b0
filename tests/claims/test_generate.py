"""`generate` of a sharded model: ranks that need different numbers of forwards do not wait."""

from functools import partial

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.generation import assert_same, continuations
from support.tiny_models import tiny

from hf_moe_ep import apply_ep_fsdp2


def generates_its_own_text(ep_size: int, rank: int, world: int) -> None:
    want = continuations(tiny(seed=0), rank)
    model = apply_ep_fsdp2(tiny(seed=rank), ep_size=ep_size)
    assert_same(f"ep {ep_size}, rank {rank}", continuations(model, rank), want)
    model.train()
    loss = model(input_ids=want["free"], labels=want["free"]).loss
    loss.backward()  # generate() left nothing behind that training trips over
    assert torch.isfinite(loss), f"ep {ep_size}: loss {loss}"


ON_FOUR_RANKS = {f"ep {ep_size}": partial(generates_its_own_text, ep_size) for ep_size in (1, 2, 4)}


@pytest.mark.parametrize("claim", on_ranks(4, ON_FOUR_RANKS))
def test_every_rank_generates_its_own_text(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
