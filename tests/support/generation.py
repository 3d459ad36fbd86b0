"""Greedy generation in which every rank has other prompts, another length and another end."""

from typing import Any

import torch
from torch import Tensor, nn

from support.tiny_models import batch, tiny


def prompts(rank: int) -> dict[str, Tensor]:
    """Two prompts of a rank's own length, the second padded on the left by one."""
    ids = batch(tiny(), 2, 3 + 2 * rank, seed=50 + rank)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def continuations(
    model: nn.Module, rank: int, inputs: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Generate two continuations per rank: `free` has its own length, `ended` stops earlier. Rank r
    ends both of its prompts, its own or `inputs`, with the token that they got at position r of
    `free`.
    """
    inputs, num_new = inputs or prompts(rank), 5 + 2 * rank
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "use_cache": True}
    options["max_new_tokens"] = num_new
    model.eval()
    free = model.generate(**inputs, eos_token_id=None, **options)
    end = free[:, inputs["input_ids"].shape[1] + rank].tolist()
    return {"free": free, "ended": model.generate(**inputs, eos_token_id=end, **options)}


def assert_same(where: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same tokens, and an early end that was one."""
    for name, tokens in want.items():
        assert torch.equal(got[name], tokens), f"{where}, {name}: {got[name]}, want {tokens}"
    assert want["ended"].shape[1] < want["free"].shape[1], f"{where}: nothing ended early"
