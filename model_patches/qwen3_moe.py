"""Qwen3-MoE, whose hub checkpoints have one tensor per expert and projection."""

from __future__ import annotations

from hf_moe_ep.plan import PER_EXPERT

DIFFERS = {"stored": PER_EXPERT}
