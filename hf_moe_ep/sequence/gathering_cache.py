"""`GatheringCache`: give local queries the keys of the whole sequence, through the cache argument.

An attention module with an indexer first scores all earlier tokens, and then attends to the tokens
with the highest scores. In generation such a module passes its new keys to a cache, which returns
the keys of all tokens so far. In training it gets this class instead, whose methods all-gather the
keys of the slices. The stock forward is unchanged, and its queries remain those of the slice:

               keys of its slice     after cache.update       queries of its slice
    rank 0     k0 k1                 k0 k1 k2 k3              q0 q1
    rank 1     k2 k3                 k0 k1 k2 k3              q2 q3

The queries, the scores of the indexer, the attention and its output are divided by sp_size. The
keys and values are not, because every rank has those of the whole sequence. With latent attention
only the latents are gathered, before the model computes keys and values from them. A rank sends
(sp - 1) * (latent + rotary + indexer) values per token of its slice in forward, for example
(sp - 1) * (512 + 64 + 128) for DeepSeek-V3.2. In backward it sends (sp - 1) * (latent + rotary)
gradients, because the choice of tokens has no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_moe_ep.sequence.slices import Slice, gather_slices


class GatheringCache:
    """The two methods of a cache that an attention module with an indexer calls."""

    def __init__(self, part: Slice) -> None:
        self._part = part

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Gather keys and values, or both parts of the latents: (B, Q, S / sp, W) to (B, Q, S, W).

        The other arguments are options of other caches.
        """
        return self._gather(keys), self._gather(values)

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Gather the keys of an indexer: (B, S / sp, W) to (B, S, W)."""
        return gather_slices(keys, self._part)

    def _gather(self, x: Tensor) -> Tensor:
        return gather_slices(x.transpose(1, 2), self._part).transpose(1, 2).contiguous()
