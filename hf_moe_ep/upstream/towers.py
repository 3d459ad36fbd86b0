"""Vision towers (models/qwen3_vl_moe), and what their model's forward takes of them."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.upstream.code import forward_arguments

TOWER_OUTPUTS = "mm_encoder_outputs"
# Runs towers before the first forward of `generate` (generation/utils.py).
ENCODE_AHEAD = "_prepare_multimodal_encoder_kwargs_for_generation"
# A block with experts for text and others for pictures (models/ernie4_5_vl_moe).
EXPERTS_OF_PICTURES = "vision_moe"
TOKEN_KINDS = "moe_mm_token_type_ids"
_ENCODER_INPUT = re.compile("pixel|image|video|audio|input_features|input_values")


def takes_tower_outputs(inner: nn.Module) -> bool:
    """Return whether the forward of `inner` takes the outputs of a vision tower that has run.

    models/qwen3_vl_moe of transformers 5.19 and newer; not of 5.16.
    """
    return TOWER_OUTPUTS in inspect.signature(inner.forward).parameters


def input_names(module: nn.Module) -> list[str]:
    """Return what the forward of `module` takes of pictures and sound, by name."""
    return [name for name in forward_arguments(module) if is_encoder_input(name)]


def is_encoder_input(name: str) -> bool:
    """Return whether `name` is what a forward calls pictures or sound, or something about them.

    models/*/modeling_*.py: pixel_values, image_grid_thw, input_features, audio_input_ids, ...
    """
    return _ENCODER_INPUT.search(name) is not None


def has_experts_of_pictures(block: nn.Module) -> bool:
    """Return whether `block` runs some of its experts only where it sees tokens of pictures."""
    return hasattr(block, EXPERTS_OF_PICTURES) and TOKEN_KINDS in forward_arguments(block)


def runs_in_blocks(owner: nn.Module, tower: Any) -> bool:
    """Return whether blocks of `tower` can be units: pictures and videos in one call, in patches.

    The towers of models/qwen3_vl_moe; of others each child of `owner` is gathered whole.
    """
    return hasattr(tower, "deepstack_merger_list") and takes_tower_outputs(owner)


def tower_heads(tower: Any) -> int:
    """Return the number of attention heads of the vision tower."""
    return int(tower.config.num_heads)


def tower_sizes(tower: Any) -> tuple[int, int]:
    """Return (m, values): m x m patches become one token, a patch is a row of `values` numbers."""
    return tower.spatial_merge_size, math.prod(tower.patch_embed.proj.weight.shape[1:])


def run_tower(inner: Any, pixels: Tensor, grids: Tensor, **kwargs: Any) -> Any:
    """Run the vision tower and return its outputs, one entry per picture.

    Args:
        inner: the model that holds the tower (models/qwen3_vl_moe).
        pixels: (patches of all pictures, values of a patch).
        grids: (pictures, 3): frames, height and width of each, in patches.
        kwargs: for the tower's forward.
    """
    return inner.get_image_features(pixels, grids, return_dict=True, **kwargs)


def tower_tables(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Return the tables that the tower would compute from `grids` (pictures, 3): a row per patch.

    Keys are the keyword arguments by which the tower takes them, interpolation and positions.
    """
    from transformers import vision_utils  # transformers 5.17 has none, and no use for it

    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    positions = vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size)
    return {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}


def split_tower_outputs(outputs: Any, counts: list[int]) -> list[Any]:
    """Split the tower's outputs into consecutive groups of `counts` pictures each.

    Each group is an output object as the inner model's forward takes it.
    """
    parts, first = [], 0
    for count in counts:
        picked = slice(first, first + count)
        features = [feature[picked] for feature in outputs.deepstack_features]
        pooled = outputs.pooler_output[picked]
        parts.append(type(outputs)(pooler_output=pooled, deepstack_features=features))
        first += count
    return parts
