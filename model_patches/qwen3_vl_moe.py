"""Qwen3-VL-MoE: hub files hold stacked experts transposed."""

from __future__ import annotations

from hf_moe_ep.plan import Stored

DIFFERS = {
    "stored": {"gate_up_proj": Stored(transposed=True), "down_proj": Stored(transposed=True)}
}
