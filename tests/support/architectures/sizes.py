"""Make a small config of every model type (`tiny_config`).

`_COMMON` holds the fields that many types have, `_TEXT` and `_WHOLE` those of single types. Sizes
differ from each other wherever an architecture allows, so that swapped axes cannot pass: hidden 40,
dense 56, experts 24, shared experts 32, 4 heads of size 12 with 2 heads of keys. Windows and the
number of keys that an indexer chooses are smaller than the sequences of the tests, and limits are
low enough to be reached.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from support.architectures.towers import class_of, parts_of, repeat_value, tower_values

_NUM_LAYERS = 4
NUM_EXPERTS = 8
VOCAB_SIZE = 97
TOP_K = 3


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": _NUM_LAYERS,
    "max_position_embeddings": 128,
    "initializer_range": 0.16,  # about 1/sqrt(hidden_size): layers keep the scale of their input
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "final_logit_softcapping": 30.0,
    # experts, in groups if the router has groups
    **repeat_value(
        NUM_EXPERTS, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    ),
    **repeat_value(TOP_K, "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
    "moe_intermediate_size": 24,
    **repeat_value(2, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    **repeat_value(32, "shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    **repeat_value(32, "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    **repeat_value(1.5, "routed_scaling_factor", "route_scale", "router_scaling_factor"),
    "moe_routed_scaling_factor": 1.5,
    "swiglu_limit": 1.2,
    **repeat_value(1, "first_k_dense_replace", "num_dense_layers"),
    "mlp_layer_types": ["dense"] + ["sparse"] * (_NUM_LAYERS - 1),
    "mlp_only_layers": [0],
    "router_aux_loss_coef": 0.1,
    **repeat_value(0.0, "router_jitter_noise", "input_jitter_noise"),
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 5,
    # latent attention: queries of size 6 + 8, values of size 10
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    # indexers
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # linear attention and Mamba
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 5,
    # hyper-connections: the number of streams equals no other size
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    # scales of the Granite family
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | values


# Type of the text part -> fields that only it has, or whose default leaves out kinds of layers.
_TEXT: dict[str, dict[str, Any]] = {
    "axk2": {"gated_norm_rank": 6},
    "bailing_hybrid": {"short_conv_kernel_size": 3},
    "cohere2_moe": {"prefix_dense_intermediate_size": 48, "expert_selection_fn": "sigmoid"},
    "dbrx": {
        "d_model": 40,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        # Transformers 5.24 reads rope_theta here, but its config has no such field.
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 24,
            "moe_num_experts": NUM_EXPERTS,
            "moe_top_k": TOP_K,
            "moe_loss_weight": 0.1,
        },
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 14,
        "index_topk": 2,
    },
    "diffusion_gemma_text": {"global_head_dim": 20, "num_global_key_value_heads": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 26,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 18,
        "swa_qk_nope_head_dim": 14,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 12],  # text experts, vision experts
        "rope_parameters": _rope(mrope_section=[2, 2, 1]),
    },
    "gemma4_text": {  # like the published models with experts, without embeddings per layer
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
    },
    "glm4v_moe_text": {
        "head_dim": 12,
        "rope_parameters": _rope(mrope_section=[1, 1, 1], partial_rotary_factor=0.5),
    },
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "index_kpool": 2,
        "indexer_types": ["full"] * _NUM_LAYERS,
    },
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full"]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 4,
    },
    "hy_v4_vl_text": {"rope_parameters": _rope(mrope_section=[1, 1, 1])},
    "inkling_text": {
        "unpadded_vocab_size": 95,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "d_rel": 10,
        "rel_extent": 7,
        "log_scaling_n_floor": 4,
        "conv_kernel_size": 3,
        "logits_mup_width_multiplier": 2.0,
    },
    "inkling2_text": {
        "unpadded_vocab_size": 95,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "d_rel": 10,
        "rel_extent": 7,
        "log_scaling_n_floor": 4,
        "conv_kernel_size": 3,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_loop_text": {
        "unpadded_vocab_size": 95,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 8,
        "sliding_window_size": 5,
        "d_rel": 10,
        "rel_extent": 7,
        "log_scaling_n_floor": 4,
        "conv_kernel_size": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 6,
    },
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},  # experts follow both mixers
    "jetmoe": {"intermediate_size": 24, "kv_channels": 12},
    "kimi_linear": {"q_lora_rank": None},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_attention_heads_per_layer": [4, 6, 4, 6],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "intermediate_size": 24,
        "intermediate_size_mlp": 56,
        "moe_layers": [1, 2, 3],
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 4,
    },
    "longcat_flash": {
        "num_layers": 3,
        "ffn_hidden_size": 56,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 5,
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "minimax": {"block_size": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "intermediate_size": 24,
        "dense_intermediate_size": 56,
        "rotary_dim": 6,
        "index_block_size": 2,
        "index_topk_blocks": 3,
    },
    "muse_spark_text": {"moe_hidden_size": 32},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "ssm_state_size": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "chunk_size": 4,
        "conv_kernel": 3,
    },
    "openai_privacy_filter": {"num_labels": 5, "classifier_dropout": 0.0},
    "phimoe": {"num_experts_per_tok": 2},  # the only number that its router supports
    "qwen3_5_moe_text": {
        "rope_parameters": _rope(mrope_section=[1, 1, 1], partial_rotary_factor=0.5),
    },
    "qwen3_next": {"rope_parameters": _rope(partial_rotary_factor=0.5)},
    "qwen3_omni_moe_text": {"rope_parameters": _rope(mrope_section=[2, 2, 1])},
    "qwen3_vl_moe_text": {"rope_parameters": _rope(mrope_section=[3, 2, 1])},
    "qwen4_exp_text": {
        "rope_parameters": _rope(mrope_section=[1, 1, 1], partial_rotary_factor=0.5),
        "hc_count": 3,
        "hc_lowrank": 10,
        "ple_layer_ids": [1],
        "ple_embed_dim": 28,
        "ple_conv_kernel_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
    },
    "sarvam_mla": {"q_lora_rank": None},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_sliding_attention_heads": 6,
        "share_expert_dim": 32,
        "moe_router_scaling_factor": 1.5,
        "swiglu_limits": [0.0, 0.6, None, 0.3],
        "swiglu_limits_shared": [0.0, None, 0.5, 0.4],
    },
    "zaya": {
        "num_experts_per_tok": 1,  # the only number that its router supports
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "router_hidden_size": 28,
    },
}


# Special tokens are at the end of the vocabulary. Random text has only ids below them.
FIRST_SPECIAL_TOKEN = 85
PLACEHOLDERS = {
    **repeat_value(85, "image_token_id", "image_token_index"),
    **repeat_value(86, "video_token_id", "video_token_index"),
    "audio_token_id": 87,
    **repeat_value(88, "vision_start_token_id", "image_start_token_id", "boi_token_id"),
    **repeat_value(89, "vision_end_token_id", "image_end_token_id", "eoi_token_id"),
    **repeat_value(90, "video_start_token_id", "boa_token_id", "audio_start_token_id"),
    **repeat_value(91, "video_end_token_id", "eoa_token_index", "audio_bos_token_id"),
    **repeat_value(92, "image_bos_token_id", "user_token_id"),
}
_WHOLE: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 5}},
    "diffusion_gemma": {"canvas_length": 6},
    "gemma4": {"audio_config": None},  # like the published models with experts
    "kimi_k25": {"projection_hidden_size": 16},  # the hidden size of its tower
    "minimax_m3_vl": {"projector_hidden_size": 28},
    "nemo_speechlm": {"audio_token_id": VOCAB_SIZE},  # behind the vocabulary, as published
    "nemotron_h_omni": {"vision_hidden_size": 16, "projector_hidden_size": 28},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 88},
    "muse_spark": {"out_hidden_size": 64, "projector_hidden_size": 28},
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Make a config whose model is small and has every kind of layer of its type.

    An override of a field that only the text part has is set in the text part.
    """
    config_class = CONFIG_MAPPING[model_type]
    parts = parts_of(config_class)
    if "text_config" not in parts:
        return config_class(**(_text_values(config_class) | overrides))
    values = {name: tower_values(part) for name, part in parts.items() if name != "text_config"}
    text, _ = class_of(parts["text_config"])
    fields, text_fields = config_class.__dataclass_fields__, text.__dataclass_fields__
    for_text = {k: v for k, v in overrides.items() if k in text_fields and k not in fields}
    values["text_config"] = {"model_type": text.model_type} | _text_values(text) | for_text
    values |= {name: token for name, token in PLACEHOLDERS.items() if name in fields}
    values |= _WHOLE.get(model_type, {})
    return config_class(**values, **{k: v for k, v in overrides.items() if k not in for_text})


def _text_values(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the values of `_COMMON` that this config has fields for, and those of its type."""
    fields = config_class.__dataclass_fields__
    values = {name: value for name, value in _COMMON.items() if name in fields}
    if "kv_lora_rank" in fields:  # every head has its own keys and values
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["head_dim"] = values["qk_rope_head_dim"]
    if "router_aux_loss_coef" in fields:
        values["output_router_logits"] = True
    kinds = list(dict.fromkeys(getattr(config_class(), "layer_types", None) or ()))
    if kinds and "layer_types" in fields:
        values["layer_types"] = [kinds[i % len(kinds)] for i in range(_NUM_LAYERS)]
    return values | _TEXT.get(config_class.model_type, {})
