"""Ranks that need different numbers of forwards do not hang in `generate` of a sharded model."""

from functools import partial
from typing import Any

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.generation import assert_same, continuations
from support.tiny_models import tiny

from hf_moe_ep import apply_ep_fsdp2


def compare_continuations(ep_size: int, options: dict[str, Any], rank: int, world: int) -> None:
    want = continuations(tiny(seed=0, **options), rank)
    model = apply_ep_fsdp2(tiny(seed=rank, **options), ep_size=ep_size)
    assert_same(f"ep {ep_size}, rank {rank}", continuations(model, rank), want)
    model.train()
    loss = model(input_ids=want["free"], labels=want["free"]).loss
    loss.backward()  # the model can be trained after generate()
    assert torch.isfinite(loss), f"ep {ep_size}: loss {loss}"


# The prompt and the new tokens of rank 0 have 8 positions. On other ranks they have more.
SHORT = {"max_position_embeddings": 8}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
ON_FOUR_RANKS = {"ep 2": partial(compare_continuations, 2, {})}
IN_OTHER_WAYS = {
    **{f"ep {ep_size}": partial(compare_continuations, ep_size, {}) for ep_size in (1, 4)},
    "past the last position on some ranks": partial(compare_continuations, 2, SHORT),
    "the same with dynamic rope": partial(compare_continuations, 2, SHORT | DYNAMIC),
}


@pytest.mark.parametrize(
    "claim", [*on_ranks(4, ON_FOUR_RANKS), *on_ranks(4, IN_OTHER_WAYS, slow=True)]
)
def test_every_rank_generates_its_own_text(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
