"""Make the configs of small towers for pictures and sound.

`_COMMON` holds the fields that many towers have, `_BY_TYPE` those of single types.
"""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

TEXT_HIDDEN_SIZE = 40


def repeat_value(value: Any, *names: str) -> dict[str, Any]:
    """Return a dict in which all `names` have the same value."""
    return dict.fromkeys(names, value)


_COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    **repeat_value(4, "num_heads", "num_attention_heads", "num_key_value_heads"),
    "head_dim": 4,
    **repeat_value(2, "depth", "num_hidden_layers"),
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "image_size": 16,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.18,
    **repeat_value(TEXT_HIDDEN_SIZE, "out_hidden_size", "text_hidden_size", "adapter_out_dim"),
    **repeat_value(TEXT_HIDDEN_SIZE, "output_dim"),
}
_BY_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2_encoder": {"num_key_value_heads": 2, "vocab_size": 11, "hidden_size": 24},
    "deepseek_ocr2_sam_vision_model": {
        "image_size": 32,
        "output_channels": 12,
        "window_size": 3,
        "global_attn_indexes": [1],
        "downsample_channels": [20, 24],
        "mlp_dim": 28,
    },
    "dots3_note_audio_encoder": {
        "feature_size": 16,
        "downsample_hidden_size": 6,
        "adapter_input_size": 16,
    },
    "dots3_note_vision_encoder": {
        "moe_intermediate_size": 12,
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "adapter_in_dim": 16,
    },
    "gemma4_audio": {"subsampling_conv_channels": [8, 4], "output_proj_dims": 18},
    "gemma4_vision": {"pooling_kernel_size": 2, "position_embedding_size": 9},
    "glm5_next_vision": {"projection_intermediate_size": 28},
    "hy_v4_vl_vision": {"max_image_size": 16},
    "inkling2_vision": {"posemb_grid_size": 5, "projection_hidden_dim": 28},
    "inkling_audio": {"n_mel_bins": 5, "mel_vocab_size": 7},
    "kimi_k25_vision": {"pos_emb_height": 4, "pos_emb_width": 4},
    "llama4_vision_model": {
        "intermediate_size": 64,  # 16 values of each of 2 x 2 patches
        **repeat_value(TEXT_HIDDEN_SIZE, "vision_output_dim"),
        **repeat_value(TEXT_HIDDEN_SIZE, "projector_input_dim", "projector_output_dim"),
    },
    "muse_spark_audio": {
        "patch_sizes": [4, 3],
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "conv_kernel_size": 3,
    },
    "muse_spark_vision": {"pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
    "nemotron3_5_transcribe_asr_audio": {"num_mel_bins": 6, "subsampling_factor": 4},
    "nemotron3_5_transcribe_word_timestamp": {"vocab_size": 11, "blank_token_id": 10},
    "nemotron3_diarization": {
        "chunk_length": 3,
        "chunk_right_context": 1,
        "chunk_left_context": 1,
        "fifo_length": 2,
        "speaker_cache_update_period": 2,
        "head_config": {
            "hidden_size": 12,
            "num_speakers": 3,
            "audio_hidden_size": 16,
            "subsampling_factor": 4,
        },
        "streaming_config": {
            "num_speakers": 3,
            "subsampling_factor": 4,
            "speaker_cache_length": 6,
        },
    },
    "nemotron3_diarization_audio": {"num_mel_bins": 6, "subsampling_factor": 4},
    "parakeet_encoder": {
        "num_mel_bins": 16,
        "conv_kernel_size": 3,
        "subsampling_conv_channels": 6,
        "attention_bias": False,
        "scale_input": False,
        # The published config has these two fields, which the class of the config has not.
        "projection_hidden_size": 28,
        "projection_bias": False,
        **repeat_value(0.0, "dropout", "layerdrop", "activation_dropout", "attention_dropout"),
    },
    "qwen3_omni_moe_audio_encoder": {
        "num_mel_bins": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 20,
        "max_source_positions": 30,
        "n_window_infer": 100,  # upstream's code needs the default n_window with it
        "downsample_hidden_size": 6,
    },
    "radio": {
        "mlp_ratio": 1.25,
        "max_img_size": 16,
        "num_registers": 2,
        "video_temporal_patch_size": 2,
    },
    "step3p5_vision": {"mlp_ratio": 1.25, "max_position_embeddings": 16},
    "unlimited_ocr_vision_encoder": {"image_size": 8},
    "unlimited_ocr_sam_vision_model": {
        "image_size": 32,
        "output_channels": 12,
        "window_size": 3,
        "global_attn_indexes": [1],
        "downsample_channels": [20, 16],
        "mlp_dim": 28,
    },
}


def tower_values(part: Any) -> dict[str, Any]:
    """Return the values of a sub-config and of the sub-configs inside of it."""
    config_class, model_type = class_of(part)
    fields = config_class.__dataclass_fields__
    values = {name: value for name, value in _COMMON.items() if name in fields}
    for name, inner in parts_of(config_class).items():
        values[name] = tower_values(inner)
    return {"model_type": model_type} | values | _BY_TYPE.get(model_type, {})


def class_of(part: Any) -> tuple[type[PreTrainedConfig], str]:
    """Return the config class and model type of a sub-config (a class or a specification)."""
    config_class = getattr(part, "config_class", part)
    if config_class is AutoConfig:
        config_class = CONFIG_MAPPING[part.model_type]
    return config_class, config_class.model_type


def parts_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the sub-configs of a config: classes, or specifications since transformers 5.23."""
    specified = getattr(config_class, "sub_configs_defaults", None)
    if specified is not None:
        return dict(specified)
    default = config_class()
    return {
        name: type(getattr(default, name)) if part is AutoConfig else part
        for name, part in config_class.sub_configs.items()
        if getattr(default, name) is not None
    }
