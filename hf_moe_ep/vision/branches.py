"""Experts for picture tokens alone, on ranks whose batch has no picture.

Some layers have one set of experts for text and one for pictures, and stock code skips the second
set if a batch has no picture tokens. With expert parallelism and FSDP2 all ranks must run both
sets, or the ranks with pictures wait for ever. So before the decoder runs, the ranks sum how many
of them have picture tokens. If any has, a rank without them runs the second set on an empty tensor:
it takes part in every exchange, and its gradients are exact zeros.

The decision is stored as an attribute of the tensor of token types, which every layer receives,
also when a layer is recomputed in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.towers import EXPERTS_OF_PICTURES, TOKEN_KINDS
from hf_moe_ep.vision.zero_gradients import ZeroGradients

_OTHERS_SEE = "_hf_moe_ep_others_see"


class MarkTextOnlyRanks(ShardedOnly):
    """Pre-forward hook of the decoder: mark the token types if only other ranks have pictures."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def run(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return None
        given = bind_forward(decoder, args, kwargs)
        kinds_BS = given.get(TOKEN_KINDS)
        mine = torch.zeros((), dtype=torch.int64, device=meshes.device)
        if kinds_BS is not None:
            mine = mine + kinds_BS.any()
        # A host sync. Stock code has one in every layer.
        here, anywhere = torch.stack([mine, sum_over_ranks(mine)]).tolist()
        if here or not anywhere:
            return None
        text = given["inputs_embeds"]
        marked_BS = torch.zeros(text.shape[:2], dtype=torch.int64, device=text.device)
        setattr(marked_BS, _OTHERS_SEE, True)
        return (), {**given, TOKEN_KINDS: marked_BS}


class RunPictureExperts(ShardedOnly):
    """Forward hook of a block: on a marked rank, run the experts for pictures on no rows."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        given = bind_forward(block, args, kwargs)
        if not getattr(given.get(TOKEN_KINDS), _OTHERS_SEE, False):
            return None
        no_rows = given["hidden_states"].flatten(0, 1)[:0]
        unused = getattr(block, EXPERTS_OF_PICTURES)(no_rows)
        out_BSH, *others = outputs
        (out_BSH,) = ZeroGradients.apply(1, False, None, out_BSH, *unused)
        return (out_BSH, *others)
