"""NLLB-MoE has an encoder and a decoder with experts, whose routers drop tokens."""

from __future__ import annotations

REFUSED = (
    "its router drops the tokens of a batch that exceed the capacity of an expert, so a rank with "
    "a part of the batch computes another model; and its experts are in an encoder and a decoder, "
    "while hf_moe_ep patches one list of decoder layers. Train it with FSDP2 alone"
)
