"""Make batches of text, images, videos and sound for two ranks, and models that take such batches.

`list_mixes(model)` lists the batches of ranks 0 and 1 for each step. `build(name)` makes a tiny
model of a type in `TYPES` or in `COMPOSITES`. A composite is a model whose own type is not a MoE
type, but whose text model has a MoE type.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from support.architectures.models import tiny
from support.architectures.parts import parts_of
from support.architectures.pictures import mixed_batch, takes_pictures, takes_sound
from support.architectures.sizes import PLACEHOLDERS, tiny_config
from support.architectures.types import MODEL_TYPES

Batch = dict[str, Tensor]
# These types mark images and videos with the same token, so stock refuses a batch with both.
ONE_TOKEN = ("glm4v_moe", "nemotron_h_omni")
MakeBatch = Callable[[nn.Module, int], Batch]


def make_text(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 0], seed=seed)


def make_image(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [1], seed=seed)


def make_images(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [2, 0, 1], seed=seed)


def make_sound(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 0], sounds=[1, 0], seed=seed)


def make_sounds(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 0], sounds=[2, 1], seed=seed)


def make_sound_and_image(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 1], sounds=[1, 0], seed=seed)


def make_video(model: Any, seed: int) -> Batch:
    """Make a batch with one video: an image whose inputs have the names of a video's inputs.

    If the tower merges n frames into one step in time, the image is repeated n times.
    """
    batch = make_image(model, seed)
    config = model.config
    if config.model_type == "nemotron_h_omni":  # videos have the token of images
        side, patch = batch.pop("pixel_values"), config.vision_config.patch_size
        height, width = (patch * int(n) for n in batch.pop("image_grid_hw")[0])
        frames = [side, side.flip(0)][: config.video_temporal_patch_size]
        batch["pixel_values_videos"] = torch.cat(frames).view(1, 1, -1, height, width)
        return batch
    frames = getattr(config.vision_config, "temporal_merge_size", 1)
    if frames > 1:
        batch["pixel_values"] = batch["pixel_values"].repeat(frames, 1)
        batch["image_grid_thw"][:, 0] = frames
    for name, new in (
        ("pixel_values", "pixel_values_videos"),
        ("image_grid_thw", "video_grid_thw"),
        ("image_position_ids", "video_position_ids"),
    ):
        if name in batch:
            batch[new] = batch.pop(name)
    if "num_frames_per_video" in _list_input_names(model):
        batch["num_frames_per_video"] = torch.tensor([1])
    kinds = ("mm_token_type_ids", "moe_mm_token_type_ids")
    batch |= {name: batch[name].masked_fill(batch[name] == 1, 2) for name in kinds if name in batch}
    ids = batch["input_ids"]
    if not config.model_type.startswith("glm"):  # GLM marks videos with image tokens
        batch["input_ids"] = ids.masked_fill(ids == config.image_token_id, config.video_token_id)
    elif config.model_type == "glm5_next":  # GLM-5-Next also marks both ends of a video
        positions = (ids[0] == config.image_token_id).nonzero().flatten()
        ids[0, positions[0] - 1] = config.video_start_token_id
        ids[0, positions[-1] + 1] = config.video_end_token_id
    return batch


def make_image_and_video(model: Any, seed: int) -> Batch:
    """Make a batch of two rows: an image in the first row, a video in the second."""
    rows = [make_image(model, seed), make_video(model, seed + 1)]
    texts = [{n: x for n, x in row.items() if n in _TEXT} for row in rows]
    longest = max(row["input_ids"].shape[1] for row in texts)
    pad = partial(torch.nn.functional.pad, mode="constant")
    fill = {"labels": -100}
    padded = [
        {n: pad(x, (0, longest - x.shape[1]), value=fill.get(n, 0)) for n, x in row.items()}
        for row in texts
    ]
    joined = {n: torch.cat([row[n] for row in padded]) for n in padded[0]}
    media = {n: x for row in rows for n, x in row.items() if n not in _TEXT}
    return joined | media


_TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "moe_mm_token_type_ids")


def _list_input_names(model: nn.Module) -> set[str]:
    forwards = (inspect.signature(module.forward) for module in model.modules())
    return {name for forward in forwards for name in forward.parameters}


def list_mixes(model: nn.Module) -> list[tuple[MakeBatch, MakeBatch]]:
    """List the functions that make the batches of rank 0 and rank 1, one pair for each step."""
    if not takes_pictures(model):
        return [
            (make_text, make_text),
            (make_text, make_sounds),
            (make_sound, make_text),
            (make_sound, make_sounds),
            (make_text, make_text),
        ]
    found: list[tuple[MakeBatch, MakeBatch]] = [
        (make_text, make_text),
        (make_text, make_images),
        (make_image, make_text),
        (make_image, make_images),
    ]
    if "pixel_values_videos" in _list_input_names(model):
        found.append((make_video, make_image))
        if model.config.model_type not in ONE_TOKEN:
            found.append((make_image_and_video, make_text))
    if takes_sound(model):
        found += [
            (make_sound, make_image),
            (make_text, make_sound),
            (make_sound_and_image, make_text),
        ]
    return [*found, (make_text, make_text)]


def build_kimi_k25(seed: int) -> nn.Module:
    """Build a Kimi-K2.5, whose text model is a DeepSeek-V3."""
    tower = {"pos_emb_height": 4, "pos_emb_width": 4, "intermediate_size": 20}
    return _build_composite("Kimi_K25", "deepseek_v3", seed, tower, projection_hidden_size=16)


def build_internvl(seed: int, text_type: str = "qwen3_moe") -> nn.Module:
    """Build an InternVL around a text model of an MoE type."""
    tower = {"image_size": 16, "intermediate_size": 20}
    return _build_composite("InternVL", text_type, seed, tower, tie_word_embeddings=False)


def _build_composite(name: str, text_type: str, seed: int, tower: Any, **fields: Any) -> nn.Module:
    """Build a multimodal model `name` around a text model of an MoE type."""
    text_config = tiny_config(text_type).to_dict() | {"output_router_logits": False}
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **tower}
    config_class = getattr(transformers, f"{name}Config")
    tokens = {n: t for n, t in PLACEHOLDERS.items() if n in config_class.__dataclass_fields__}
    vision = {**tower, "patch_size": 4, "initializer_range": 0.18}
    config = config_class(text_config=text_config, vision_config=vision, **tokens, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().train()
    model.set_experts_implementation("eager")
    return model


def _has_encoder(model_type: str) -> bool:
    config = tiny_config(model_type)
    parts = ("vision_config", "audio_config")
    return any(getattr(config, part, None) is not None for part in parts)


TYPES = [name for name in MODEL_TYPES if _has_encoder(name)]
# In older Transformers, the config of Kimi-K2.5 does not name the type of its text model.
COMPOSITES = {
    name: make
    for name, make in {"kimi_k25": build_kimi_k25, "internvl": build_internvl}.items()
    if name not in TYPES
}


# All experts of a layer of muse_spark share this norm. `build` freezes it. The tests in
# tests/architectures/test_shared_by_experts.py train it.
SHARED_BY_EXPERTS = "post_expert_norm"


def build(name: str, seed: int = 0) -> nn.Module:
    """Build a tiny model without a load-balancing loss.

    A load-balancing loss depends on the batches of all ranks together, so it is not the sum of
    stock's losses of single batches. A norm that all experts of a layer share is frozen.
    """
    if name in COMPOSITES:
        return COMPOSITES[name](seed)
    fields = tiny_config(name).get_text_config().__dataclass_fields__
    options = {"output_router_logits": False} if "output_router_logits" in fields else {}
    model = tiny(name, seed=seed, **options)
    for key, parameter in model.named_parameters():
        if SHARED_BY_EXPERTS in key:
            parameter.requires_grad_(False)
    return model


def freeze_encoders(model: nn.Module) -> None:
    for name in list_encoder_names(model):
        model.get_submodule(name).requires_grad_(False)


def list_encoder_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the encoders (towers, projectors) of a model that is not sharded."""
    plan = parts_of(model).plan
    names = plan.encoders or (plan.vision.tower,)
    return tuple(n for n, _ in model.named_modules() if any(n.endswith(name) for name in names))
