"""Run experts for picture tokens on ranks whose batch has no picture.

Some layers have one set of experts for text and another for pictures, and stock code skips the
second set if a batch has no picture tokens. With expert parallelism and FSDP2 all ranks must run
both sets, or the ranks with pictures wait forever. Before the decoder runs, the ranks therefore
count how many of them have picture tokens. If at least one rank has picture tokens, every rank
without them runs the second set on an empty tensor. Such a rank takes part in every exchange, and
its gradients are exact zeros.

The decision is stored as an attribute of the tensor of token types, which has the kind of each
token: text or picture. Every layer receives this tensor, also in a recompute in backward. If ranks
share a batch, the decision depends on the tokens in the slice of a rank, and is stored in the slice
of the token types.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ShardedOnly
from hf_moe_ep.upstream.models import bind_forward
from hf_moe_ep.upstream.towers import EXPERTS_OF_PICTURES, TOKEN_KINDS
from hf_moe_ep.vision.zero_gradients import ZeroGradients

_ONLY_OTHERS_HAVE_PICTURES = "_hf_moe_ep_only_others_have_pictures"


class MarkTextOnlyRanks(ShardedOnly):
    """Pre-forward hook of the decoder that marks the types if only other ranks have pictures."""

    def run(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.state.meshes
        if meshes is None or meshes.world_size == 1:
            return None
        given = bind_forward(decoder, args, kwargs)
        kinds_BS: Tensor | None = given.get(TOKEN_KINDS)
        part: Slice | None = given.get(SLICE)
        has_pictures = torch.zeros((), dtype=torch.int64, device=meshes.device)
        if kinds_BS is not None:
            has_pictures = has_pictures + _find_own_kinds(kinds_BS, part).any()
        # This is one host sync per forward. Stock code has a host sync in every layer.
        counts = torch.stack([has_pictures, sum_over_ranks(has_pictures)])
        has_own, ranks_with_pictures = counts.tolist()
        if has_own or ranks_with_pictures == 0:
            return None
        embeds_BSH = given["inputs_embeds"]
        # The layers of a slice receive a tensor of their own, which can be marked. The caller's
        # tensor must not be marked, so without a slice the layers get new types: those of text.
        marked_BS = kinds_BS
        if part is None or marked_BS is None:
            marked_BS = embeds_BSH.new_zeros(embeds_BSH.shape[:2], dtype=torch.int64)
        setattr(_find_own_kinds(marked_BS, part), _ONLY_OTHERS_HAVE_PICTURES, True)
        return (), {**given, TOKEN_KINDS: marked_BS}


def _find_own_kinds(kinds_BS: Tensor, part: Slice | None) -> Tensor:
    """Return the token types that the layers of this rank receive, which may be a slice."""
    return kinds_BS if part is None else part.take_shared(kinds_BS, 1)


class RunPictureExperts(ShardedOnly):
    """Forward hook of a block that, on a marked rank, runs the experts for pictures on no rows."""

    def run(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        given = bind_forward(block, args, kwargs)
        if not getattr(given.get(TOKEN_KINDS), _ONLY_OTHERS_HAVE_PICTURES, False):
            return None
        no_rows = given["hidden_states"].flatten(0, 1)[:0]
        unused = getattr(block, EXPERTS_OF_PICTURES)(no_rows)
        out_BSH, *other_outputs = outputs
        (out_BSH,) = ZeroGradients.apply(1, False, None, out_BSH, *unused)
        return (out_BSH, *other_outputs)
