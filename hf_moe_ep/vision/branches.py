"""Experts of pictures alone, which stock code runs where a batch has tokens of pictures.

A layer has one set of experts for text and one for pictures. With ep and FSDP2 both are run by all
ranks together, so a rank of text alone would leave the others waiting. Before the decoder begins
ranks tell each other whether they have such tokens. If any has, a rank without runs the second set
on no rows, which trade places with those of other ranks, and its gradient is one of exact zeros.

That a rank has to is written on the tensor of token types, which goes through the layers, and
through a layer that is computed again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import ModelState, ShardedOnly
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.towers import EXPERTS_OF_PICTURES, TOKEN_KINDS
from hf_moe_ep.vision.tie import Tie

_OTHERS_SEE = "_hf_moe_ep_others_see"


class TellKinds(ShardedOnly):
    """Marks the token types of a rank without pictures, where another has some.

    A pre-forward hook of the decoder.
    """

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
        # The host waits: stock code does too, in every layer.
        here, anywhere = torch.stack([mine, sum_over_ranks(mine)]).tolist()
        if here or not anywhere:
            return None
        text = given["inputs_embeds"]
        marked_BS = torch.zeros(text.shape[:2], dtype=torch.int64, device=text.device)
        setattr(marked_BS, _OTHERS_SEE, True)
        return (), {**given, TOKEN_KINDS: marked_BS}


class RunOnNothing(ShardedOnly):
    """Runs the experts of pictures on no rows, behind those of text: a forward hook of a block."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        given = bind_forward(block, args, kwargs)
        if not getattr(given.get(TOKEN_KINDS), _OTHERS_SEE, False):
            return None
        hidden_BSH = given["hidden_states"]
        of_nothing = getattr(block, EXPERTS_OF_PICTURES)(hidden_BSH.flatten(0, 1)[:0])
        out_BSH, *others = outputs
        return (Tie.apply(out_BSH, *of_nothing), *others)
