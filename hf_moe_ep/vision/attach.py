"""What `patch` does for a vision tower:

the tower's owner     a pre-forward hook that runs the tower on every rank or on none
with sp_size > 1      hooks on the tower and the language model that take and join slices of the
                      patches; attention modules of the tower get a config that selects ours
"""

from __future__ import annotations

from hf_moe_ep.architectures import Parts
from hf_moe_ep.sequence.attach import select_attention
from hf_moe_ep.sequence.ulysses import check_heads
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.attention_interface import check_attention
from hf_moe_ep.upstream.towers import tower_heads
from hf_moe_ep.vision.patches import (
    JoinFeatures,
    TakeDeepstack,
    TakePatches,
    patch_attention_with,
)
from hf_moe_ep.vision.tower import TowerOnce


def check(parts: Parts, state: ModelState) -> None:
    """Refuse, with sp_size > 1, a vision tower whose attention cannot be split.

    Raises:
        ValueError: its heads do not divide by sp_size, or it uses eager attention or one that is
            not in transformers' interface.
    """
    if parts.tower is None or state.config.sp_size == 1:
        return
    heads = tower_heads(parts.tower.module)
    check_heads(heads, heads, state.config.sp_size or 1)
    check_attention(parts.tower.attention[0])


def attach(parts: Parts, state: ModelState) -> None:
    """Register hooks on the tower, on its owner and on the language model behind it."""
    tower = parts.tower
    if tower is None:
        return
    run_once = TowerOnce(state, tower.module)
    tower.owner.register_forward_pre_hook(run_once, with_kwargs=True)
    if state.config.sp_size == 1:
        return
    select_attention(tower.attention, state, patch_attention_with, frames=True)
    tower.module.register_forward_pre_hook(TakePatches(), with_kwargs=True)
    tower.module.register_forward_hook(JoinFeatures(), with_kwargs=True)
    tower.decoder.register_forward_pre_hook(TakeDeepstack(), with_kwargs=True)
