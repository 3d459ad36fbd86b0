"""NLLB-MoE has an encoder and a decoder with experts, whose routers drop tokens."""

from __future__ import annotations

REFUSED = (
    "its router drops the tokens of a batch that exceed the capacity of an expert, so a rank with "
    "a part of the batch computes another model; and its experts are in an encoder and in a "
    "decoder, which run on different sequences. Train it with FSDP2 alone"
)
