"""What was tested against stock, by `config.model_type`; everything else is derived."""

from __future__ import annotations

# Sequence parallelism: every mixer of the decoder goes through transformers' attention interface.
SEQUENCE_PARALLEL = frozenset({"qwen3_moe", "qwen3_vl_moe"})

# Adapters on stacked experts that are written as adapters on gate_proj, up_proj and down_proj of
# every expert, and back: where such experts stand.
SINGLE_EXPERTS = {
    "qwen3_moe": "layers.*.mlp.experts",
    "qwen3_vl_moe": "language_model.layers.*.mlp.experts",
}
