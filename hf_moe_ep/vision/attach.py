"""What `patch` does for what sees and hears.

Where a tower's blocks are units of their own:

the tower's owner     a pre-forward hook that runs the tower on every rank or on none
the root              does the same for what `generate` is given
with sp_size > 1      hooks on the tower and the language model that take and join slices of the
                      patches; attention modules of the tower get a config that selects ours

Where towers are of any other making:

their owner           a pre-forward hook that gathers all of them, if any rank has input
the decoder           a pre-forward hook that gives every rank a gradient for the same parameters
every encoder         hooks that refuse it unless it is gathered, and note what it makes
the root              encodes what `generate` is given with all of them gathered

Where a layer has experts of pictures alone:

the decoder           a pre-forward hook that tells the layers whether another rank has some
their block           a hook that runs them on no rows then

Where towers were not found, in a model that takes pictures or sound:

the root              a pre-forward hook that refuses ranks which were given different kinds, as
                      is done for what `generate` is given
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hf_moe_ep.architectures import Encoders, Parts
from hf_moe_ep.sequence.attach import select_attention
from hf_moe_ep.sequence.ulysses import check_heads
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.attention_interface import check_attention
from hf_moe_ep.upstream.towers import (
    ENCODE_AHEAD,
    has_experts_of_pictures,
    input_names,
    tower_heads,
)
from hf_moe_ep.vision.branches import RunOnNothing, TellKinds
from hf_moe_ep.vision.encoders import (
    GatherEncoders,
    NoteGraph,
    OnlyGathered,
    TieEncoders,
    encode_ahead,
)
from hf_moe_ep.vision.patches import (
    JoinFeatures,
    TakeDeepstack,
    TakePatches,
    patch_attention_with,
)
from hf_moe_ep.vision.tower import TowerOnce
from hf_moe_ep.vision.unlike import RefuseUnlike


def check(parts: Parts, state: ModelState) -> None:
    """Refuse, with sp_size > 1, a vision tower whose attention cannot be split.

    Raises:
        ValueError: its heads do not divide by sp_size, or it uses eager attention or one that is
            not in transformers' interface.
    """
    if state.config.sp_size == 1:
        return
    if parts.encoders is not None:
        raise ValueError(
            f"sp_size ({state.config.sp_size}) > 1 was not built for the "
            f"{', '.join(parts.plan.encoders)} of {parts.plan.model_type}; leave sp_size at 1"
        )
    if parts.tower is None:
        return
    heads = tower_heads(parts.tower.module)
    check_heads(heads, heads, state.config.sp_size or 1)
    check_attention(parts.tower.attention[0])


def attach(parts: Parts, state: ModelState) -> None:
    """Register hooks on the tower, on its owner and on the language model behind it."""
    tower = parts.tower
    if parts.encoders is not None:
        _attach_encoders(parts.root, parts.encoders, state)
    if tower is None and parts.encoders is None:
        names = sorted({name for module in parts.root.modules() for name in input_names(module)})
        if names:
            refuse = RefuseUnlike(state, names)
            parts.root.register_forward_pre_hook(refuse, with_kwargs=True)
            _encode_ahead_by(partial(refuse.encode_ahead, parts.root), parts.root, state)
    if tower is None:
        return
    run_once = TowerOnce(state, tower.module, len(parts.layers))
    tower.owner.register_forward_pre_hook(run_once, with_kwargs=True)
    _encode_ahead_by(partial(run_once.encode_ahead, parts.root, tower.owner), parts.root, state)
    if state.config.sp_size == 1:
        return
    select_attention(tower.attention, state, patch_attention_with, frames=True)
    tower.module.register_forward_pre_hook(TakePatches(), with_kwargs=True)
    tower.module.register_forward_hook(JoinFeatures(), with_kwargs=True)
    tower.decoder.register_forward_pre_hook(TakeDeepstack(), with_kwargs=True)


def _attach_encoders(root: Any, encoders: Encoders, state: ModelState) -> None:
    before = GatherEncoders(state)
    encoders.owner.register_forward_pre_hook(before, with_kwargs=True)
    tie = TieEncoders(state, encoders.owner, before)
    encoders.decoder.register_forward_pre_hook(tie, with_kwargs=True)
    for module in encoders.modules:
        module.register_forward_pre_hook(OnlyGathered())
        module.register_forward_hook(NoteGraph(before))
    blocks = [m for m in encoders.decoder.modules() if has_experts_of_pictures(m)]
    if blocks:
        encoders.decoder.register_forward_pre_hook(TellKinds(state), with_kwargs=True)
    for block in blocks:
        block.register_forward_hook(RunOnNothing(state), with_kwargs=True)
    _encode_ahead_by(partial(encode_ahead, state, root), root, state)


def _encode_ahead_by(ahead: Callable[..., Any], root: nn.Module, state: ModelState) -> None:
    """Put `ahead(stock, model_kwargs)` in the place of what encodes in front of `generate`."""
    if hasattr(root, ENCODE_AHEAD):
        state.replace(root, ENCODE_AHEAD, partial(ahead, getattr(root, ENCODE_AHEAD)))
