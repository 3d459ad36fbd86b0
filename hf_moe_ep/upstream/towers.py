"""Vision towers (models/qwen3_vl_moe), and what their model's forward takes of them."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor, nn

TOWER_OUTPUTS = "mm_encoder_outputs"


def takes_tower_outputs(inner: nn.Module) -> bool:
    """Whether forward lets us run the vision tower ourselves (models/qwen3_vl_moe, since 5.23)."""
    return TOWER_OUTPUTS in inspect.signature(inner.forward).parameters


def tower_heads(tower: Any) -> int:
    """Attention heads of the vision tower."""
    return int(tower.config.num_heads)


def tower_sizes(tower: Any) -> tuple[int, int]:
    """Patches that are merged along one side, and values of one patch (models/qwen3_vl_moe)."""
    return tower.spatial_merge_size, math.prod(tower.patch_embed.proj.weight.shape[1:])


def run_tower(inner: Any, pixels: Tensor, grids: Tensor, **kwargs: Any) -> Any:
    """The vision tower's outputs, one entry per picture (models/qwen3_vl_moe)."""
    return inner.get_image_features(pixels, grids, return_dict=True, **kwargs)


def tower_tables(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """What the tower computes of `grids` with a row per patch, as it accepts it precomputed."""
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
    """Outputs of consecutive groups of pictures, as the inner model's forward takes them."""
    parts, first = [], 0
    for count in counts:
        picked = slice(first, first + count)
        features = [feature[picked] for feature in outputs.deepstack_features]
        pooled = outputs.pooler_output[picked]
        parts.append(type(outputs)(pooler_output=pooled, deepstack_features=features))
        first += count
    return parts
