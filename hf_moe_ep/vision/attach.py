"""Register the hooks of models with pictures or sound.

The owner of a tower or of encoders is the module whose forward runs first the tower or the encoders
and then the language model. `generate` calls a method of the root to encode pictures and sound
before its first forward. This call gets a wrapper that does the same as the first hook of each
list.

If the blocks of a vision tower are FSDP2 units of their own:

owner of the tower      pre-forward hook: run the tower on all ranks or on no rank
tower                   with sp_size > 1, hooks that slice the patches and gather the features
tower's attention       with sp_size > 1, a config that selects `patch_attention`
language model          if ranks share a batch, pre-forward hook: slice the deepstack features

If there are encoders of other classes:

owner of the encoders   pre-forward hook: gather all encoders if at least one rank has input
decoder                 pre-forward hook: give every rank gradients for the same parameters
                        if ranks share a batch, pre-forward hook: slice the deepstack features
every encoder           pre-forward hook: raise an error if the encoder is not gathered
                        forward hook: record if an output requires a gradient
                        if ranks share a batch, pre-forward hook: encode all pictures

If layers have additional experts that only tokens of pictures use:

decoder                 pre-forward hook: mark a rank without pictures if another rank has pictures
block of such a layer   forward hook: on a marked rank, run these experts on an empty tensor

If the model takes pictures or sound, but no encoder was found:

root                    pre-forward hook: raise an error if ranks have different kinds of input
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
    count_tower_heads,
    has_experts_of_pictures,
    list_input_names,
)
from hf_moe_ep.vision.branches import MarkTextOnlyRanks, RunPictureExperts
from hf_moe_ep.vision.different_inputs import RefuseDifferentInputs
from hf_moe_ep.vision.encoders import (
    AlignGradients,
    DropSlice,
    GatherEncoders,
    RecordGraph,
    RefuseShardedEncoder,
    encode_before_generate,
)
from hf_moe_ep.vision.patches import (
    JoinFeatures,
    TakeDeepstack,
    TakePatches,
    wrap_patch_attention,
)
from hf_moe_ep.vision.tower import TowerOnce


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if sp_size is > 1 and the attention of the vision tower cannot be split.

    The reason is that sp_size does not divide the heads of the tower, or that the tower uses eager
    attention, or a function that is not in transformers' attention interface.
    """
    if state.config.sp_size == 1 or parts.tower is None:
        return
    heads = count_tower_heads(parts.tower.module)
    check_heads({(heads, heads)}, state.config.sp_size or 1)
    check_attention(parts.tower.attention[0])


def attach(parts: Parts, state: ModelState) -> None:
    """Register the hooks that the module docstring lists."""
    tower = parts.tower
    if parts.encoders is not None:
        _attach_encoders(parts.root, parts.encoders, state)
    if tower is None and parts.encoders is None:
        names = sorted(
            {name for module in parts.root.modules() for name in list_input_names(module)}
        )
        if names:
            refuse = RefuseDifferentInputs(state, names)
            parts.root.register_forward_pre_hook(refuse, with_kwargs=True)
            _wrap_encoding(partial(refuse.encode_before_generate, parts.root), parts.root, state)
    if tower is None:
        return
    run_tower_once = TowerOnce(state, tower.module, len(parts.main_layers))
    tower.owner.register_forward_pre_hook(run_tower_once, with_kwargs=True)
    encode_on_all_ranks = partial(run_tower_once.encode_before_generate, tower.owner)
    _wrap_encoding(encode_on_all_ranks, parts.root, state)
    if state.config.ranks_per_batch > 1:
        tower.decoder.register_forward_pre_hook(TakeDeepstack(), with_kwargs=True)
    if (state.config.sp_size or 1) == 1:
        return
    select_attention(tower.attention, state, wrap_patch_attention, frames=True)
    tower.module.register_forward_pre_hook(TakePatches(), with_kwargs=True)
    tower.module.register_forward_hook(JoinFeatures(), with_kwargs=True)


def _attach_encoders(root: Any, encoders: Encoders, state: ModelState) -> None:
    gather_encoders = GatherEncoders(state)
    encoders.owner.register_forward_pre_hook(gather_encoders, with_kwargs=True)
    align_gradients = AlignGradients(state, encoders.owner, gather_encoders)
    encoders.decoder.register_forward_pre_hook(align_gradients, with_kwargs=True)
    for module in encoders.modules:
        module.register_forward_pre_hook(RefuseShardedEncoder())
        module.register_forward_hook(RecordGraph(gather_encoders, root))
    if state.config.ranks_per_batch > 1:
        for module in encoders.modules:
            module.register_forward_pre_hook(DropSlice(), with_kwargs=True)
        encoders.decoder.register_forward_pre_hook(TakeDeepstack(), with_kwargs=True)
    blocks = [m for m in encoders.decoder.modules() if has_experts_of_pictures(m)]
    if blocks:
        encoders.decoder.register_forward_pre_hook(MarkTextOnlyRanks(state), with_kwargs=True)
    for block in blocks:
        block.register_forward_hook(RunPictureExperts(state), with_kwargs=True)
    _wrap_encoding(partial(encode_before_generate, state, root), root, state)


def _wrap_encoding(wrapper: Callable[..., Any], root: nn.Module, state: ModelState) -> None:
    """Make `generate` call `wrapper(stock, model_kwargs)` instead of the method `stock`.

    `stock` is the method of the root that encodes pictures and sound.
    """
    if hasattr(root, ENCODE_AHEAD):
        state.replace(root, ENCODE_AHEAD, partial(wrapper, getattr(root, ENCODE_AHEAD)))
