"""Split the patches of pictures over the ranks of an sp group.

All ranks of an sp group have the same pictures. With context parallelism, each sp group encodes all
pictures of its batch. Each rank of the group takes a slice of all patches, in whole merge units
(2 x 2 patches become one token). In attention each rank computes some of the heads over whole
pictures (`sequence/ulysses.py`). The merged features are all-gathered once, after the tower. With
2 ranks, picture A of 3 tokens and picture B of 2 tokens:

             patches, blocks, mergers      after the all-gather
    rank 0   AAAA AAAA AAAA                features of A and B
    rank 1   BBBB BBBB (padding)           features of A and B

The model inserts the features into the embeddings of the whole sequence, which is split later. The
tower also returns deepstack features: these are outputs of its middle blocks, which the first
layers of the language model add to the tokens of pictures. The layers run after the split, so each
rank keeps the rows of these features that belong to its slice of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices
from hf_moe_ep.sequence.ulysses import exchange_for_heads, exchange_for_tokens
from hf_moe_ep.state import PackageHook
from hf_moe_ep.upstream.attention_interface import copy_with_stock_config
from hf_moe_ep.upstream.towers import compute_tower_tables


class PatchSlice(Slice):
    """The slice of one rank, of the patches of all pictures.

    Attributes:
        frames: the number of patches in each frame. A picture has one frame, a video has several.
    """

    def __init__(self, sequence: Slice, frames: list[int], unit: int) -> None:
        heads = sequence.sp_slice  # each sp group encodes all pictures
        super().__init__(heads.group, heads.rank, heads.size, sum(frames), unit)
        self.frames = frames

    def make_feature_slice(self) -> Slice:
        """Return this rank's slice of the features; each unit of patches becomes one feature."""
        return Slice(self.group, self.rank, self.size, self.length // self.unit)


class TakePatches(PackageHook):
    """Pre-forward hook of the tower that slices the pixels and the tables made from `grid_thw`."""

    @torch.compiler.disable
    def __call__(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: PatchSlice | None = kwargs.get(SLICE)
        if part is None:
            return None
        tables = compute_tower_tables(tower, kwargs["grid_thw"])
        slices: dict[str, Any] = {name: part.take(table, 0) for name, table in tables.items()}
        # This is a Python number, so that layers need not read it from the device.
        slices["max_seqlen"] = max(part.frames)
        return (part.take(args[0], 0), *args[1:]), {**kwargs, **slices}


class JoinFeatures(PackageHook):
    """Forward hook of the tower that gathers the features of all slices in one all-gather."""

    @torch.compiler.disable
    def __call__(
        self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        part: PatchSlice | None = kwargs.get(SLICE)
        if part is None:
            return None
        own_features = torch.stack([outputs.pooler_output, *outputs.deepstack_features])
        all_features = gather_slices(own_features, part.make_feature_slice())
        # An in-place operator on a view would lose the hook that FSDP2 registers on the output.
        pooled, *deepstack = (features.clone() for features in all_features)
        return type(outputs)(pooler_output=pooled, deepstack_features=deepstack)


class TakeDeepstack(PackageHook):
    """Pre-forward hook of the language model that slices the deepstack features like the text."""

    @torch.compiler.disable
    def __call__(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        features = kwargs.get("deepstack_visual_embeds")
        if part is None or features is None:
            return None
        is_visual_BS: Tensor = kwargs["visual_pos_masks"]
        row_BS = is_visual_BS.flatten().cumsum(0).view_as(is_visual_BS) - 1
        own_mask_BS = part.take(is_visual_BS, 1)
        rows = part.take(row_BS, 1)[own_mask_BS]
        deepstack = [feature[rows] for feature in features]
        return args, {
            **kwargs,
            "visual_pos_masks": own_mask_BS,
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
    """Compute attention within each frame for this rank's heads.

    This function is registered with transformers' attention interface.

    Args:
        stock: the attention function that the user chose.
        varlen: True if `stock` itself separates frames by `cu_seq_lens_q`. Otherwise `stock` is
            called once per frame.
        module: the attention module, whose config selects this function.
        query, key, value: (1, heads, patches of this rank, head width).
        cu_seq_lens_q: (frames + 1,), the start of each frame and the end of the last frame.

    Returns:
        The output (1, patches of this rank, heads, head width), and None for the weights.
    """
    part: PatchSlice | None = kwargs.pop(SLICE, None)
    module = copy_with_stock_config(module)
    if part is not None:
        query, key, value = exchange_for_heads([query, key, value], part)
    if varlen:
        kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        kwargs |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        out, _ = stock(module, query, key, value, attention_mask, **kwargs)
    else:
        frames = part.frames if part is not None else cu_seq_lens_q.diff().tolist()
        by_frame = zip(*(x.split(frames, 2) for x in (query, key, value)), strict=True)
        outs = [stock(module, *qkv, attention_mask, **kwargs)[0] for qkv in by_frame]
        out = torch.cat(outs, 1)
    return (out if part is None else exchange_for_tokens(out, part)), None


def wrap_patch_attention(stock: Callable[..., Any], *, varlen: bool) -> Callable[..., Any]:
    """Return `patch_attention` with a stock attention function as its first argument."""
    return partial(patch_attention, stock, varlen)
