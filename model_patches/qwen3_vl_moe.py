"""Hub checkpoints of Qwen3-VL-MoE have stacked and transposed expert matrices.

transformers' conversion_mapping renames the keys (`upstream/conversion.py`).
"""

from __future__ import annotations

from hf_moe_ep.plan import Stored

DIFFERS = {
    "stored": {"gate_up_proj": Stored(transposed=True), "down_proj": Stored(transposed=True)}
}
