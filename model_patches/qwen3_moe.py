"""Qwen3-MoE: 128 experts, top-8, in Qwen3-30B-A3B and Qwen3-235B-A22B.

Layers without experts: those in `mlp_only_layers`, and with `decoder_sparse_step = n` all but
every n-th (transformers, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer).
"""

from __future__ import annotations

from hf_moe_ep.plan import PER_EXPERT, ModelPlan, count_sparse_layers

PLAN = ModelPlan(
    model_type="qwen3_moe",
    num_moe_layers=count_sparse_layers,
    stored=PER_EXPERT,
    aux_loss_coef="router_aux_loss_coef",
)
