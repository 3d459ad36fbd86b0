"""The router of Doge mixes the tokens of a batch."""

from __future__ import annotations

REFUSED = (
    "its router (DogeCDMoE) computes a token's choice of experts from the router logits of two "
    "tokens of the batch, so a rank with a part of the batch computes another model; each of its "
    "experts is one row of two embeddings, which FSDP2 alone can shard"
)
