"""Hub checkpoints of Qwen3-MoE have one tensor per expert and projection."""

from __future__ import annotations

from hf_moe_ep.plan import PER_EXPERT

DIFFERS = {"stored": PER_EXPERT}
