"""Generate greedily with prompts, lengths and end tokens that differ by rank."""

from typing import Any

import torch
from torch import Tensor, nn

from support.tiny_models import batch, tiny


def prompts(rank: int) -> dict[str, Tensor]:
    """Make two prompts whose length depends on the rank. The second has one token of padding."""
    ids = batch(tiny(), 2, 3 + 2 * rank, seed=50 + rank)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def continuations(
    model: nn.Module, rank: int, inputs: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Generate twice from the rank's prompts, or from `inputs`.

    `free` has as many tokens as the rank may generate. For `ended`, the tokens at position r of
    rank r's `free` continuations are end tokens, so generation stops earlier.
    """
    inputs, num_new = inputs or prompts(rank), 5 + 2 * rank
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "use_cache": True}
    options["max_new_tokens"] = num_new
    model.eval()
    free = model.generate(**inputs, eos_token_id=None, **options)
    end = free[:, inputs["input_ids"].shape[1] + rank].tolist()
    return {"free": free, "ended": model.generate(**inputs, eos_token_id=end, **options)}


def assert_same(where: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Check that tokens are the same, and that `ended` did stop earlier."""
    for name, tokens in want.items():
        assert torch.equal(got[name], tokens), f"{where}, {name}: {got[name]}, want {tokens}"
    assert want["ended"].shape[1] < want["free"].shape[1], f"{where}: no generation stopped early"
