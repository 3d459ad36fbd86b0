"""Llama-4 with a vision tower has the language model of `llama4_text.py`."""

from __future__ import annotations

from hf_moe_ep.model_patches.llama4_text import BLOCK

DIFFERS = {"block": BLOCK, "whole_sequences": ("language_model.model.layers.*.self_attn",)}
