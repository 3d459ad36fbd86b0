"""Run vision towers, and find the arguments of a forward for pictures and sound.

The private names come from transformers' models/qwen3_vl_moe, models/ernie4_5_vl_moe and
generation/utils.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.upstream.code import list_forward_arguments

# The argument of a forward for the outputs of a tower that has run before.
TOWER_OUTPUTS = "mm_encoder_outputs"
# `generate` calls this method to run the towers of a model before the first forward.
ENCODE_AHEAD = "_prepare_multimodal_encoder_kwargs_for_generation"
# In a block that has experts for text and other experts for pictures: the module with the experts
# for pictures, and the forward's argument with the kind of each token.
EXPERTS_OF_PICTURES = "vision_moe"
TOKEN_KINDS = "moe_mm_token_type_ids"
_ENCODER_INPUT = re.compile("pixel|image|video|audio|input_features|input_values")


def takes_tower_outputs(inner: nn.Module) -> bool:
    """Return True if the forward of `inner` accepts outputs of a tower that has run before.

    In models/qwen3_vl_moe this argument exists since transformers 5.19, and not in 5.16. ms-swift
    sets a forward on the object, which passes this argument on to the forward of the class.
    """
    return TOWER_OUTPUTS in list_forward_arguments(inner)


def list_input_names(module: nn.Module) -> list[str]:
    """Return the names of the forward's arguments for pictures and sound."""
    return [name for name in list_forward_arguments(module) if is_encoder_input(name)]


def is_encoder_input(name: str) -> bool:
    """Return True if `name` is a forward argument for pictures or sound, or for their sizes.

    Examples are pixel_values, image_grid_thw, input_features and audio_input_ids.
    """
    return _ENCODER_INPUT.search(name) is not None


def has_experts_of_pictures(block: nn.Module) -> bool:
    """Return True if `block` has experts that run only for tokens of pictures."""
    return hasattr(block, EXPERTS_OF_PICTURES) and TOKEN_KINDS in list_forward_arguments(block)


def runs_in_blocks(owner: nn.Module, tower: Any) -> bool:
    """Return True if the blocks of `tower` can be FSDP2 units.

    This is possible if the model calls the tower once, with the patches of all pictures and videos.
    Only models/qwen3_vl_moe is known to do this. Other encoders are all-gathered as a whole.
    """
    return hasattr(tower, "deepstack_merger_list") and takes_tower_outputs(owner)


def count_tower_heads(tower: Any) -> int:
    """Return the number of attention heads of a vision tower."""
    return int(tower.config.num_heads)


def get_tower_sizes(tower: Any) -> tuple[int, int]:
    """Return (m, n): m x m patches become one token, and a patch consists of n numbers."""
    return tower.spatial_merge_size, math.prod(tower.patch_embed.proj.weight.shape[1:])


def run_tower(inner: Any, pixels: Tensor, grids: Tensor, **kwargs: Any) -> Any:
    """Run the vision tower and return its outputs, one entry per picture.

    Args:
        inner: the model that contains the tower (models/qwen3_vl_moe).
        pixels: (patches of all pictures, numbers per patch).
        grids: (pictures, 3), the frames, height and width of each picture, in patches.
        kwargs: more arguments of the tower's forward.
    """
    return inner.get_image_features(pixels, grids, return_dict=True, **kwargs)


def compute_tower_tables(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Compute a tower's tables for interpolation and positions from `grids` (pictures, 3).

    Each table has a row per patch. The keys of the result are keyword arguments of the tower.
    """
    from transformers import vision_utils  # Missing in 5.17, where no tower takes tables.

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
    """Split the outputs of a tower into groups of consecutive pictures. `counts` has their sizes.

    Each group is an output object that the inner model's forward accepts.
    """
    groups, start = [], 0
    for count in counts:
        group = slice(start, start + count)
        features = [feature[group] for feature in outputs.deepstack_features]
        pooled = outputs.pooler_output[group]
        groups.append(type(outputs)(pooler_output=pooled, deepstack_features=features))
        start += count
    return groups
