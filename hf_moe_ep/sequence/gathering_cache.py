"""Give a rank's queries the keys of the whole sequence by the cache argument (`GatheringCache`).

An attention module with an indexer first scores all earlier tokens, and then attends to the tokens
with the highest scores. In generation such a module passes its new keys to a cache, which returns
the keys of all tokens so far. In a forward whose sequences are split it gets a `GatheringCache`
instead, whose methods all-gather the keys of the slices. The stock forward is unchanged, and keeps
the queries of its slice:

               keys of its slice     after cache.update       queries of its slice
    rank 0     k0 k1                 k0 k1 k2 k3              q0 q1
    rank 1     k2 k3                 k0 k1 k2 k3              q2 q3

Each rank has 1 / sp_size of the queries, of the indexer's scores and of the attention, but the keys
and values of the whole sequence. With latent attention only the latents are gathered, before the
model computes keys and values from them. With context parallelism all cp x sp ranks of a batch
gather keys in this way, and their slices are consecutive. A rank sends (sp - 1) * (latent + rotary
+ indexer) values per token of its slice in forward, for example (sp - 1) * (512 + 64 + 128) for
DeepSeek-V3.2. In backward it sends (sp - 1) * (latent + rotary) gradients, because the choice of
tokens has no gradient.

A compressor (DeepSeek-V4) joins the keys of a window of tokens into one key. It passes its keys and
gates to the cache, which gathers both, so that every rank compresses all windows of the sequence.
Attention uses the same tensor as keys and as values, and gathers it once. Let W be the width of a
head, and C the width of the compressor's keys (2 W if windows overlap). For each token of its slice
a rank sends (sp - 1) * (W + 2 C) values in forward, and as many in backward: attention's keys, and
the compressor's keys and gates. The compressor of an indexer sends its keys and gates only in
forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_moe_ep.sequence.slices import Slice, gather_slices


class GatheringCache:
    """The methods of a cache that an attention module with an indexer or compressor calls.

    Args:
        part: the slice of this rank.
        compress_rate: the number of tokens in a window of the module's compressor.

    Attributes:
        keys: the keys that `update` returned last.
    """

    def __init__(self, part: Slice, compress_rate: int = 1) -> None:
        self.part, self.compress_rate = part, compress_rate
        self.keys: Tensor | None = None

    @property
    def layers(self) -> Mapping[int, _Layer]:
        """The layers by index. Each is a view of this cache, which belongs to one module."""
        return defaultdict(lambda: _Layer(self))

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Gather keys and values, or both parts of the latents: (B, Q, S / sp, W) to (B, Q, S, W).

        Other caches use the remaining arguments.
        """
        self.keys = self.gather(keys)
        return self.keys, self.keys if values is keys else self.gather(values)

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Gather the keys of an indexer: (B, S / sp, W) to (B, S, W)."""
        return gather_slices(keys, self.part)

    def gather(self, x: Tensor) -> Tensor:
        """Gather (B, Q, S / sp, W) to (B, Q, S, W)."""
        return gather_slices(x.transpose(1, 2), self.part).transpose(1, 2).contiguous()


class _Layer:
    """The methods of a layer of a cache that indexers and compressors call."""

    def __init__(self, cache: GatheringCache) -> None:
        self._cache = cache

    @property
    def keys(self) -> Tensor:
        """The keys (B, Q, S, W) of the whole sequence."""
        assert self._cache.keys is not None, "the attention gathers its keys first"
        return self._cache.keys

    def get_seq_length(self) -> int:
        """Return the number of tokens up to the end of the slice, which has the last query."""
        part = self._cache.part
        assert part.is_in_order, "the queries of a slice are consecutive (sequence/attach.py)"
        return (part.rank + 1) * part.local_length

    def update_index(self, keys: Tensor) -> Tensor:
        """Gather the keys of an indexer: (B, Q, S / sp, W) to (B, Q, S, W)."""
        return self._cache.gather(keys)

    def store_compression_weights(
        self, name: str, keys: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Gather keys and gates, (B, S / sp, C) to (B, S, C).

        Returns:
            The keys and the gates, without the last tokens if these do not fill a window, and the
            position of the first window (0).
        """
        part, rate = self._cache.part, self._cache.compress_rate
        stop = part.length // rate * rate
        return gather_slices(keys, part)[:, :stop], gather_slices(gates, part)[:, :stop], 0

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        """Return no window from before the sequence."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Return the compressed keys unchanged; they already cover the whole sequence."""
        return compressed
