"""List the architectures that were tested against stock, by `config.model_type`.

An architecture that is missing here can be patched, sharded and trained without a message. But
sp_size > 1 is refused (`sequence/attach.py`), and so is the export of adapters on single experts.
"""

from __future__ import annotations

# Architectures for which sp_size > 1 was tested against stock.
SEQUENCE_PARALLEL = frozenset(
    {
        "afmoe",
        "aria",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "beam",
        "cohere2_moe",
        "dbrx",
        "deepseek_ocr2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "dots3_note",
        "dots3_note_text",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma4",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm5_next",
        "glm_moe_dsa",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hy_v4_vl",
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
        "jamba",
        "jetmoe",
        "kimi_k25",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lara_mini",
        "lfm2_moe",
        "llama4",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "mistral4",
        "mistral_large4",
        "mixtral",
        "muse_spark",
        "nemo_speechlm",
        "nemotron_h",
        "nemotron_h_omni",
        "olmoe",
        "openai_privacy_filter",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe_thinker",
        "qwen3_vl_moe",
        "qwen4_exp",
        "qwen4_exp_text",
        "sarvam_mla",
        "sarvam_moe",
        "solar_open",
        "step3p7",
        "unlimited_ocr",
        "zaya",
    }
)

# For these architectures transformers builds attention masks without the positions of the text, so
# that in stock, packed documents attend to each other. Our hooks separate the documents
# (sequence/packed_rows.py).
MASKS_WITHOUT_POSITIONS = frozenset(
    {"afmoe", "ernie4_5_vl_moe", "glm4v_moe", "gpt_oss", "openai_privacy_filter"}
)

# Architectures for which cp_size > 1 was tested against stock.
CONTEXT_PARALLEL = SEQUENCE_PARALLEL

# Architectures for which this was tested against stock: with sp_size > 1, attention with an indexer
# computes its slice of the queries, and gathers only keys (sequence/gathering_cache.py).
GATHERS_KEYS = frozenset(
    {
        "axk2",
        "deepseek_v32",
        "deepseek_v4",
        "dots3_note",
        "dots3_note_text",
        "glm5_next",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "mistral_large4",
    }
)

# Architectures for which this was tested against stock: with sp_size > 1, delta nets, state space
# models and short convolutions compute their slice of the sequence, and recurrences are split as in
# sequence/recurrences.py.
SPLITS_MIXERS = frozenset(
    {
        "bailing_hybrid",
        "glm5_next",
        "granitemoehybrid",
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2_moe",
        "nemo_speechlm",
        "nemotron_h",
        "nemotron_h_omni",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
    }
)

# Architectures whose adapters on stacked experts can be exported as adapters on gate_proj, up_proj
# and down_proj of each expert, and read back, with a pattern of the names of experts modules.
SINGLE_EXPERTS = {
    "qwen3_moe": "layers.*.mlp.experts",
    "qwen3_vl_moe": "language_model.layers.*.mlp.experts",
}

# Architectures whose heads for multi-token prediction were tested (`mtp_head.py`): the layout of a
# head in checkpoints ("shared" or "own" projections), and the field of the text config that has the
# number of its layers.
MTP_HEADS = {
    "deepseek_v3": ("own", "num_nextn_predict_layers"),
    "glm4_moe": ("own", "num_nextn_predict_layers"),
    "qwen3_5_moe_text": ("shared", "mtp_num_hidden_layers"),
    "qwen3_next": ("shared", "num_nextn_predict_layers"),
}
