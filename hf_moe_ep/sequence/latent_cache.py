"""With cp_size > 1, gather latents before keys and values are computed from them (`LatentCache`).

Latent attention (MLA) computes the keys and values of all heads from one latent and one rotary key
per token. In generation it stores latents and rotary keys in its cache, and computes keys and
values afterwards. In a forward that is split over cp ranks it gets a `LatentCache`, whose method
all-gathers latents and rotary keys over the cp group:

    stock code     latent, rotary key      for the tokens of this rank
    cache.update   all-gather              over the cp ranks
    stock code     keys, values            for all tokens
    attention      queries of this rank    (context.py)

For DeepSeek-V3 a rank sends (cp - 1) * (512 + 64) values per token of its slice, where the keys and
values of its 128 heads would be (cp - 1) * 128 * (192 + 128) values. If sp_size is > 1 as well, the
cp group of a rank has one rank of each sp group, so the all-gather has only 1 / sp_size of the
tokens. The all-to-all of sequence parallelism (`ulysses.py`) then completes the tokens, and divides
the heads:

                          rank 0    rank 1    rank 2    rank 3        (cp 2 x sp 2, 16 tokens)
    tokens                0-3       12-15     4-7       8-11
    after the gather      0-7       12-15,    0-7       12-15,
                                    8-11                8-11
    after the exchange    0-15      0-15      0-15      0-15          half of the heads

`restore_order` sorts the tokens after the exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices
from hf_moe_ep.state import PackageHook
from hf_moe_ep.upstream.models import CACHE_NAMES


class LatentCache:
    """Replaces the cache of latent attention. `part` is the slice of this rank."""

    def __init__(self, part: Slice) -> None:
        self.part = part

    @torch.compiler.disable
    def update(
        self, latents: Tensor, rotary_keys: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Gather (B, Q, S / (cp * sp), W) over the cp group. The other arguments are ignored."""
        part = self.part
        assert part.cp_slice is not None
        context = part.cp_slice
        if part.sp_slice.size > 1:
            # Without zigzag order: one slice per cp rank, which `restore_order` sorts later.
            length = context.size * part.local_length
            context = Slice(context.group, context.rank, context.size, length)
        packed = torch.cat([latents, rotary_keys], -1).transpose(1, 2)
        gathered = gather_slices(packed, context).transpose(1, 2)
        part.keys_are_gathered = True
        all_latents, all_rotary_keys = gathered.split(
            [latents.shape[-1], rotary_keys.shape[-1]], -1
        )
        return all_latents, all_rotary_keys


class GatherLatents(PackageHook):
    """Pre-forward hook of latent attention, which passes a `LatentCache` as the cache."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        if part is None or part.cp_slice is None:
            return None
        cache = LatentCache(part)
        return args, kwargs | {name: cache for name in CACHE_NAMES if name in kwargs}


def restore_order(x: Tensor, part: Slice) -> Tensor:
    """Sort the tokens (B, Q / sp, tokens, W) that were gathered over cp and exchanged over sp.

    In `x` the tokens are ordered by sp rank, then by cp rank. `Slice.join` needs them ordered by cp
    rank, then by sp rank.
    """
    assert part.cp_slice is not None
    by_rank = x.unflatten(2, (part.sp_slice.size, part.cp_slice.size, -1)).transpose(2, 3)
    return part.join(by_rank.flatten(2, 4), 2)
