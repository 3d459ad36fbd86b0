"""Switch Transformers have an encoder and a decoder with experts, whose routers drop tokens."""

from __future__ import annotations

REFUSED = (
    "its experts are in an encoder and in a decoder, which run on different sequences, and its "
    "router drops the tokens of a row, padding included, that exceed the capacity of an expert. "
    "Train it with FSDP2 alone"
)
