"""The architectures that were tested against stock, by `config.model_type`.

An architecture that is missing here can be patched, sharded and trained without a message. Only
sp_size > 1 is refused (`sequence/attach.py`), and so is the export of adapters on single experts.
"""

from __future__ import annotations

# Architectures for which sp_size > 1 was tested against stock. In these decoders only attention
# modules that call transformers' attention interface mix tokens.
SEQUENCE_PARALLEL = frozenset(
    {
        "afmoe",
        "aria_text",
        "axk1",
        "beam",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "kolibri1",
        "laguna",
        "mellum",
        "mimo_v2_flash",
        "minimax_m2",
        "mistral4",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_vl_moe",
        "solar_open",
    }
)

# Architectures whose adapters on stacked experts can be exported as adapters on gate_proj, up_proj
# and down_proj of each expert, and read back. The values are patterns of experts' module names.
SINGLE_EXPERTS = {
    "qwen3_moe": "layers.*.mlp.experts",
    "qwen3_vl_moe": "language_model.layers.*.mlp.experts",
}
