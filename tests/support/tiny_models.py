"""Stock models small enough for fp64 on one core, and batches for them.

Sizes differ wherever the architecture allows, so that swapped axes cannot pass. Weights are larger
than the stock initialisation: with a std of 0.02 layers would hardly change the residual stream,
the router would be almost uniform, and a wrong expert would change the loss by less than rounding.
"""

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

_QWEN3_MOE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,  # as in the published checkpoints
    "initializer_range": 0.18,  # about 1/sqrt(hidden_size): layers keep the scale of their input
    "attn_implementation": "sdpa",
}
QWEN3_VL_MOE = {
    "text_config": _QWEN3_MOE
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "vision_config": {
        "depth": 3,
        "hidden_size": 16,
        "num_heads": 4,
        "intermediate_size": 20,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.18,
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "attn_implementation": "sdpa",
}
# A delta net and an attention. Its batches are those of QWEN3_VL_MOE.
_QWEN3_5_MOE = QWEN3_VL_MOE | {
    "text_config": {name: x for name, x in _QWEN3_MOE.items() if name != "norm_topk_prob"}
    | {
        "shared_expert_intermediate_size": 28,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5,
        },
    },
    "vision_config": {
        name: x
        for name, x in QWEN3_VL_MOE["vision_config"].items()
        if name != "deepstack_visual_indexes"
    },
}
_ARCHITECTURES = {
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, _QWEN3_5_MOE),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _QWEN3_MOE),
    "qwen3_moe, rewards": (Qwen3MoeConfig, Qwen3MoeForSequenceClassification, _QWEN3_MOE),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, QWEN3_VL_MOE),
}


def tiny(
    name: str = "qwen3_moe",
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    experts_implementation: str | None = "eager",
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build a stock model in training mode. Equal seeds and sizes give equal weights.

    The default of `experts_implementation` is "eager", because stock's default, F.grouped_mm, has
    no fp64 on CPU.
    """
    config_class, model_class, sizes = _ARCHITECTURES[name]
    config = config_class(
        **(sizes | config_overrides), experts_implementation=experts_implementation
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _spread(model)
    return model.to(dtype).train()


def _spread(model: PreTrainedModel) -> None:
    """Make norms differ from each other, and make routers use all experts even in short batches."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith(".gate.weight"):
                torch.nn.init.orthogonal_(parameter)  # rows of norm 1 make logits of about std 1


def batch(
    model: PreTrainedModel,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    *,
    ignore: float = 0.25,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """Make input_ids, attention_mask and labels, each (batch_size, seq_len) int64 on the CPU.

    About a share `ignore` of the labels is -100, unevenly over the rows. Row i has
    `pad * i // (batch_size - 1)` tokens of padding on the right, so the last row has `pad`. The
    label at position 1 is never ignored, so every row has a target.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, seq_len)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(vocab_size, shape, generator=generator)
    num_padded = pad * torch.arange(batch_size) // max(batch_size - 1, 1)
    is_pad = torch.arange(seq_len) >= seq_len - num_padded[:, None]
    ignored = torch.rand(shape, generator=generator) < ignore
    ignored[:, 1] = False
    labels = input_ids.masked_fill(ignored | is_pad, -100)
    return {
        "input_ids": input_ids.masked_fill(is_pad, 0),
        "attention_mask": (~is_pad).long(),
        "labels": labels,
    }


# The items of a row of a vision batch: a number of text tokens, (height, width) of an image in
# patches, or (frames, height, width) of a video. Heights and widths are multiples of 2, the tower's
# merge size.
Row = list[int | tuple[int, ...]]


def vision_batch(
    model: PreTrainedModel, rows: list[Row], seed: int = 0, *, left: bool = False
) -> dict[str, torch.Tensor]:
    """Make the batch that Qwen3-VL's processor would make for `rows`, with labels.

    Like the processor, put a text token in front of every frame of a video. Rows are padded on the
    right, or on the left. A quarter of the text tokens has no label, but the second text token of a
    row always has one. Placeholders have no labels.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    sequences: list[list[int]] = []  # token types: 0 text, 1 image, 2 video; 3 will be padding
    grids: dict[int, list[tuple[int, ...]]] = {1: [], 2: []}
    for row in rows:
        types: list[int] = []
        for item in row:
            if isinstance(item, int):
                types += [0] * item
                continue
            frames, height, width = item if len(item) == 3 else (1, *item)
            kind = 2 if len(item) == 3 else 1
            grids[kind].append((frames, height, width))
            for _ in range(frames):
                types += [0] * (kind == 2) + [kind] * (height * width // 4)
        sequences.append(types)
    length = max(map(len, sequences))
    padded = [(-1 if left else 1, length - len(types), types) for types in sequences]
    types = torch.tensor(
        [[3] * n + t if side < 0 else t + [3] * n for side, n, t in padded], dtype=torch.int64
    )
    input_ids = torch.randint(config.image_token_id, types.shape, generator=generator)
    input_ids[types == 1], input_ids[types == 2] = config.image_token_id, config.video_token_id
    text = types == 0
    ignored = torch.rand(types.shape, generator=generator) < 0.25
    second = (text.cumsum(1) == 2) & text
    result = {
        "input_ids": input_ids.masked_fill(types == 3, 0),
        "attention_mask": (types != 3).long(),
        "labels": input_ids.masked_fill(~text | (ignored & ~second), -100),
        "mm_token_type_ids": types.masked_fill(types == 3, 0).int(),
    }
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    for kind, pixels, grid in (
        (1, "pixel_values", "image_grid_thw"),
        (2, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids[kind]:
            result[grid] = torch.tensor(grids[kind])
            patches = int(result[grid].prod(1).sum())
            draw = torch.randn(patches, values, generator=generator, dtype=torch.float64)
            result[pixels] = draw
    return result
