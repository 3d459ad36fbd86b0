"""Switch Transformers have an encoder and a decoder with experts."""

from __future__ import annotations

REFUSED = (
    "its experts are in an encoder and in a decoder, while hf_moe_ep patches one list of decoder "
    "layers. Train it with FSDP2 alone"
)
