"""`generate` of a sharded model: ranks need different numbers of forwards and must not wait."""

import torch
from support.generation import assert_same, continuations
from support.ranks import run_ranks
from support.tiny_models import tiny

from hf_moe_ep import apply_ep_fsdp2


def test_every_rank_generates_its_own_text() -> None:
    run_ranks(_generate, 4, [1, 2, 4], timeout=120)


def _generate(rank: int, world: int, ep_sizes: list[int]) -> None:
    want = continuations(tiny(seed=0), rank)
    for ep_size in ep_sizes:
        model = apply_ep_fsdp2(tiny(seed=rank), ep_size=ep_size)
        assert_same(f"ep {ep_size}, rank {rank}", continuations(model, rank), want)
        model.train()
        loss = model(input_ids=want["free"], labels=want["free"]).loss
        loss.backward()  # generate() left nothing behind that training trips over
        assert torch.isfinite(loss), f"ep {ep_size}: loss {loss}"
