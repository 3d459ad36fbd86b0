"""Qwen3-VL-MoE, whose hub checkpoints have stacked and transposed expert matrices.

Keys are renamed by transformers' own tables (`upstream/conversion.py`).
"""

from __future__ import annotations

from hf_moe_ep.plan import Stored

DIFFERS = {
    "stored": {"gate_up_proj": Stored(transposed=True), "down_proj": Stored(transposed=True)}
}
