"""Make pictures and sound as processors would, for every type that takes them (`mixed_batch`).

A picture has as many placeholder tokens in the text as the model's tower returns rows for it.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.architectures.inputs import with_canvas
from support.architectures.sizes import FIRST_SPECIAL_TOKEN

_TEXT, _IMAGE, _AUDIO, _PADDING = 0, 1, 3, 4
# Heights and widths in patches of the first, second, ... picture of a batch.
_SIZES = ((4, 2), (2, 4), (4, 4))


def takes_pictures(model: PreTrainedModel) -> bool:
    return getattr(model.config, "vision_config", None) is not None


def takes_sound(model: PreTrainedModel) -> bool:
    return getattr(model.config, "audio_config", None) is not None


def mixed_batch(
    model: PreTrainedModel,
    pictures: Sequence[int],
    *,
    sounds: Sequence[int] = (),
    text: int = 9,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Make a batch whose row i has `pictures[i]` pictures and then `sounds[i]` clips of sound.

    `text` tokens of text stand in front of, between and behind them. Rows are padded on the right.
    A quarter of the text tokens has no label, and placeholders have none.
    """
    generator = torch.Generator().manual_seed(seed)
    sounds = [*sounds, *[0] * (len(pictures) - len(sounds))]
    media: list[dict[str, Tensor]] = []
    rows: list[list[int]] = []
    for num_pictures, num_sounds in zip(pictures, sounds, strict=True):
        row = [_TEXT] * text
        for kind in [_IMAGE] * num_pictures + [_AUDIO] * num_sounds:
            medium = (_picture if kind == _IMAGE else _sound)(model, generator, len(media))
            row += [kind] * _num_placeholders(model, kind, medium) + [_TEXT] * text
            media.append(medium)
        rows.append(row)
    longest = max(map(len, rows))
    kinds = torch.tensor([row + [_PADDING] * (longest - len(row)) for row in rows])
    return with_canvas(model, _text_of(model, kinds, generator), seed) | _concatenate(media)


def _text_of(
    model: PreTrainedModel, kinds: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    input_ids = torch.randint(FIRST_SPECIAL_TOKEN, kinds.shape, generator=generator)
    ignored = torch.rand(kinds.shape, generator=generator) < 0.25
    ignored[:, 1] = False
    result = {
        "labels": input_ids.masked_fill((kinds != _TEXT) | ignored, -100),
        "attention_mask": (kinds != _PADDING).long(),
    }
    config = model.config
    input_ids = input_ids.masked_fill(kinds == _PADDING, 0)
    for kind, name in ((_IMAGE, "image_token_id"), (_AUDIO, "audio_token_id")):
        if (kinds == kind).any():
            input_ids = input_ids.masked_fill(kinds == kind, getattr(config, name))
    types = kinds.masked_fill(kinds == _PADDING, 0).int()
    takes = signature(model.forward).parameters
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in takes:
            result[name] = types
    return {"input_ids": input_ids} | result


def _concatenate(media: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for medium in media for name in medium)
    return {name: torch.cat([medium[name] for medium in media if name in medium]) for name in names}


def _num_placeholders(model: PreTrainedModel, kind: int, medium: dict[str, Tensor]) -> int:
    name = "get_image_features" if kind == _IMAGE else "get_audio_features"
    with torch.no_grad():
        out = getattr(_module_with(model, name), name)(**medium, return_dict=True)
    features = getattr(out, "pooler_output", None)
    features = out.last_hidden_state if features is None else features
    features = [features] if isinstance(features, Tensor) else features
    hidden_size = model.config.get_text_config().hidden_size
    return sum(part.numel() for part in features) // hidden_size


def _module_with(model: PreTrainedModel, name: str) -> nn.Module:
    """Return the outermost module below the head, or the model, that has the method `name`."""
    inner = getattr(model, "model", model)
    return next(module for module in inner.modules() if hasattr(module, name))


def _picture(model: PreTrainedModel, generator: torch.Generator, index: int) -> dict[str, Any]:
    """Make a picture. If a type takes no sizes as inputs, all pictures have the same size."""
    config = model.config.vision_config
    if hasattr(config, "sam_config"):
        config = config.sam_config
    patch = config.patch_size
    height, width = _SIZES[index % len(_SIZES)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    module = _module_with(model, "get_image_features")
    takes = signature(module.get_image_features).parameters
    if config.model_type == "inkling_vision":  # takes any number of patches, one row per patch
        frames = config.temporal_patch_size
        return {"pixel_values": draw(height * width, frames, patch, patch, config.num_channels)}
    if config.model_type == "inkling2_vision":
        return {
            "pixel_values": draw(height * width // 4, 2 * patch, 2 * patch, config.num_channels),
            "image_grid_thw": torch.tensor([[1, height // 2, width // 2]]),
        }
    if "image_grid_thw" in takes:
        frames = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
        flat = config.model_type != "kimi_k25_vision"
        patch_shape = (3 * frames * patch**2,) if flat else (3, patch, patch)
        return {
            "pixel_values": draw(height * width, *patch_shape),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }
    if "image_grid_hw" in takes:
        return {
            "pixel_values": draw(height * width, 3 * patch**2),
            "image_grid_hw": torch.tensor([[height, width]]),
        }
    if "image_position_ids" in takes:
        y, x = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        return {
            "pixel_values": draw(1, 16, 3 * patch**2),
            "image_position_ids": torch.stack([x.flatten(), y.flatten()], dim=-1)[None],
        }
    if "image_sizes" in takes:
        return {
            "pixel_values": draw(1, 3, 4 * patch, 4 * patch),
            "image_sizes": torch.tensor([[4 * patch, 4 * patch]]),
        }
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return {"pixel_values": draw(1, 3, size, size)}


def _sound(model: PreTrainedModel, generator: torch.Generator, _: int) -> dict[str, Tensor]:
    """Make a clip with enough frames for two to six placeholders."""
    config = model.config.audio_config
    if config.model_type == "inkling_audio":
        shape = (1, 4, config.n_mel_bins)
        return {"audio_input_ids": torch.randint(config.mel_vocab_size, shape, generator=generator)}

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if config.model_type == "muse_spark_audio":
        return {"input_values": draw(1, 4 * config.samples_per_token)}
    if config.model_type == "gemma4_audio":
        frames = torch.ones(1, 16, dtype=torch.bool)
        return {
            "input_features": draw(1, 16, config.subsampling_conv_channels[0]),
            "input_features_mask": frames,
        }
    if config.model_type in ("nemotron3_5_transcribe_audio", "parakeet_encoder"):
        bins = getattr(config, "asr_config", config).num_mel_bins
        return {
            "input_features": draw(1, 32, bins),
            "input_features_mask": torch.ones(1, 32, dtype=torch.bool),
        }
    if config.model_type == "dots3_note_audio_encoder":
        return {
            "input_features": draw(1, config.feature_size, 32),
            "chunk_sample_lengths": torch.tensor([32 * config.hop_length]),
        }
    return {
        "input_features": draw(1, config.num_mel_bins, 32),
        "feature_attention_mask": torch.ones(1, 32, dtype=torch.int64),
    }
