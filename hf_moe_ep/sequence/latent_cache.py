"""`LatentCache`: with cp_size > 1, gather latents in front of the keys and values made from them.

Latent attention (MLA) computes the keys and values of all heads from one latent and one rotary key
per token. In generation it stores these two in its cache, and computes keys and values afterwards.
In training it gets this class instead, whose method all-gathers them over the cp group:

    stock code     latent, rotary key      for the tokens of this rank
    cache.update   all-gather              over the cp ranks
    stock code     keys, values            for all tokens
    attention      queries of this rank    (context.py)

For DeepSeek-V3 a rank sends (cp - 1) * (512 + 64) values per token of its slice. The keys and
values of its 128 heads would be (cp - 1) * 128 * (192 + 128). With sequence parallelism, too, a
rank gathers the latents of the cp ranks with its own index in their sp groups. The keys and values
are then exchanged for those of this rank's heads, as without context parallelism:

                          rank 0    rank 1    rank 2    rank 3        (cp 2 x sp 2, 16 tokens)
    tokens                0-3       12-15     4-7       8-11
    after the gather      0-7       12-15,    0-7       12-15,
                                    8-11                8-11
    after the exchange    0-15      0-15      0-15      0-15          half of the heads

The order of the tokens is restored after the exchange (`whole_order`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices
from hf_moe_ep.state import Ours
from hf_moe_ep.upstream.models import CACHE_NAMES


class LatentCache:
    """The method of a cache that latent attention calls; `part` is the slice of this rank."""

    def __init__(self, part: Slice) -> None:
        self.part = part

    @torch.compiler.disable
    def update(
        self, latents: Tensor, rotary_keys: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Gather (B, Q, S / ranks, W) over the cp group; other arguments are for other caches."""
        part = self.part
        assert part.context is not None
        context = part.context
        if part.heads.size > 1:
            # One slice per cp rank, in turn.
            context = Slice(context.group, context.rank, context.size, context.size * part.local)
        together = torch.cat([latents, rotary_keys], -1).transpose(1, 2)
        whole = gather_slices(together, context).transpose(1, 2)
        part.keys_are_gathered = True
        first, second = whole.split([latents.shape[-1], rotary_keys.shape[-1]], -1)
        return first, second


class GatherLatents(Ours):
    """Pre-forward hook of latent attention: passes a `LatentCache` as its cache."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        if part is None or part.context is None:
            return None
        cache = LatentCache(part)
        return args, kwargs | {name: cache for name in CACHE_NAMES if name in kwargs}


def whole_order(x: Tensor, part: Slice) -> Tensor:
    """Put the exchanged tokens (B, Q / sp, cp * S, W) of gathered slices into their order.

    The exchange has the slices of one sp rank after those of another one, each of all cp ranks.
    """
    assert part.context is not None
    by_rank = x.unflatten(2, (part.heads.size, part.context.size, -1)).transpose(2, 3)
    return part.join(by_rank.flatten(2, 4), 2)
