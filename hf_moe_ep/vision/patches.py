"""Patches of pictures, split over the ranks of an sp group.

Within an sp group all ranks have the same pictures. Each takes its slice of all their patches, in
whole merge units (2 x 2 patches become one token), attends over whole pictures for some of the
heads (`sequence/ulysses.py`), and the merged features are gathered once, behind the tower. 2 ranks,
pictures of 3 and 2 tokens:

    rank 0   AAAA AAAA AAAA      patches, blocks, mergers      features of A and B, whole
    rank 1   BBBB BBBB (pad)

The language model's embeddings take them for the whole sequence; of the deepstack features, which
its first layers add, each rank keeps the rows of its slice of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices
from hf_moe_ep.sequence.ulysses import own_heads, own_tokens
from hf_moe_ep.state import Ours
from hf_moe_ep.upstream.attention_interface import stock_attention
from hf_moe_ep.upstream.towers import tower_tables


class PatchSlice(Slice):
    """A slice of the patches of all pictures; `frames` are the patches of each frame."""

    def __init__(self, sequence: Slice, frames: list[int], unit: int) -> None:
        super().__init__(sequence.group, sequence.rank, sequence.size, sum(frames), unit)
        self.frames = frames

    def of_features(self) -> Slice:
        """The same for what the mergers make of each unit."""
        return Slice(self.group, self.rank, self.size, self.length // self.unit)


class TakePatches(Ours):
    """Pre-forward hook of the tower: pixels and what is made of `grid_thw` become the slice."""

    @torch.compiler.disable
    def __call__(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: PatchSlice | None = kwargs.get(SLICE)
        if part is None:
            return None
        tables = tower_tables(tower, kwargs["grid_thw"])
        mine: dict[str, Any] = {name: part.take(table, 0) for name, table in tables.items()}
        # Known here, so that no layer waits for it.
        mine["max_seqlen"] = max(part.frames)
        return (part.take(args[0], 0), *args[1:]), {**kwargs, **mine}


class JoinFeatures(Ours):
    """Forward hook of the tower: what its mergers made, of all patches, in one exchange."""

    @torch.compiler.disable
    def __call__(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        part: PatchSlice | None = kwargs.get(SLICE)
        if part is None:
            return None
        mine = torch.stack([outputs.pooler_output, *outputs.deepstack_features])
        whole = gather_slices(mine, part.of_features())
        # Copies, because FSDP2's hook on a view would be lost to an in-place op.
        pooled, *deepstack = (features.clone() for features in whole)
        return type(outputs)(pooler_output=pooled, deepstack_features=deepstack)


class TakeDeepstack(Ours):
    """Pre-forward hook of the language model: deepstack features of its slice of the text."""

    @torch.compiler.disable
    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        features = kwargs.get("deepstack_visual_embeds")
        if part is None or features is None:
            return None
        seen_BS: Tensor = kwargs["visual_pos_masks"]
        row_BS = seen_BS.flatten().cumsum(0).view_as(seen_BS) - 1
        mine_BS = part.take(seen_BS, 1)
        rows = part.take(row_BS, 1)[mine_BS]
        deepstack = [feature[rows] for feature in features]
        return args, {
            **kwargs,
            "visual_pos_masks": mine_BS,
            "deepstack_visual_embeds": deepstack,
        }


def patch_attention(
    stock: Callable[..., Any],
    varlen: bool,
    module: nn.Module,
    query: Tensor,  # (1, Q, patches / sp, W)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention within each frame, for this rank's heads; registered with transformers.

    `varlen`: whether the stock function takes frames as `cu_seq_lens_q`, or one at a time.
    """
    part: PatchSlice | None = kwargs.pop(SLICE, None)
    module = stock_attention(module)
    if part is not None:
        query, key, value = own_heads(query, key, value, part)
    if varlen:
        kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        kwargs |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        out, _ = stock(module, query, key, value, attention_mask, **kwargs)
    else:
        frames = part.frames if part is not None else cu_seq_lens_q.diff().tolist()
        each = zip(*(x.split(frames, 2) for x in (query, key, value)), strict=True)
        out = torch.cat([stock(module, *qkv, attention_mask, **kwargs)[0] for qkv in each], 1)
    return (out if part is None else own_tokens(out, part)), None


def patch_attention_with(stock: Callable[..., Any], *, varlen: bool) -> Callable[..., Any]:
    """`patch_attention` around a stock attention function."""
    return partial(patch_attention, stock, varlen)
