"""Qwen3-VL-MoE: a vision tower in front of the text model of Qwen3-MoE's shape, for instance
Qwen3-VL-30B-A3B and Qwen3-VL-235B-A22B.

Layers without experts as in Qwen3-MoE (transformers, models/qwen3_vl_moe/modeling_qwen3_vl_moe.py,
Qwen3VLMoeTextDecoderLayer).
"""

from __future__ import annotations

from hf_moe_ep.plan import ModelPlan, Stored, VisionPlan, count_sparse_layers

PLAN = ModelPlan(
    model_type="qwen3_vl_moe",
    prefix="language_model.",
    num_moe_layers=count_sparse_layers,
    stored={"gate_up_proj": Stored(transposed=True), "down_proj": Stored(transposed=True)},
    aux_loss_coef="config.text_config.router_aux_loss_coef",
    vision=VisionPlan(tower="visual", blocks="visual.blocks.*", attention="visual.blocks.*.attn"),
)
