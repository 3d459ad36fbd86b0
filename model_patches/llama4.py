"""Llama-4 with its vision tower. The language model has the blocks of `llama4_text`."""

from __future__ import annotations

from hf_moe_ep.model_patches.llama4_text import BLOCK

DIFFERS = {"block": BLOCK}
