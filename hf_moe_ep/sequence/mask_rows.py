"""Build only the rows of attention masks that belong to the queries of this cp rank.

For padded or packed batches and for sliding windows, Transformers builds masks (B, 1, S, S) of all
queries and keys. A cp rank needs only the S / cp rows of its own queries. With cp 2 and 16 tokens
in zigzag order (`slices.py`):

    rank 0    rows 0-3, rows 12-15     (B, 1, 8, 16)
    rank 1    rows 4-7, rows 8-11      (B, 1, 8, 16)

The functions of transformers' masking_utils.py, such as `create_causal_mask`, decide which query
sees which key. They call the mask function of the attention implementation with the number of
queries and the position of the first query. The modules that call `create_causal_mask` get a view
of their config that selects `MaskRows` as the mask function. `MaskRows` calls the stock function
once for each piece of this rank.

These cases are left to stock code: batches that need no mask, models whose mixers contain
attention, packed rows of a model with mixers, and FlexAttention and flash attention, which need no
such masks. A mask that the caller has built is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.architectures import Parts
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.sequence.split import EndForward, RunningSlice
from hf_moe_ep.state import ModelState, PackageHook
from hf_moe_ep.upstream.attention_interface import builds_dense_masks, make_mask_config


class MaskRows(RunningSlice):
    """The mask function of a module that builds masks; `part` is the slice of its forward."""

    def applies(self) -> bool:
        """Return True in a forward whose sequences are split over cp ranks."""
        return self.part is not None and self.part.cp_slice is not None

    def __call__(self, stock: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
        """Call a stock mask function for the rows of this rank, or for all rows.

        Returns:
            (B, 1, S / cp, S), or the result of the stock function: None or (B, 1, S, S).
        """
        context = None if self.part is None else self.part.cp_slice
        if context is None or not _has_rows(self.part, kwargs) or _is_left_out(stock, kwargs):
            return stock(**kwargs)
        context.has_mask_rows = True
        # With these flags stock code would return None for a piece whose rows need no mask.
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        rows = []
        for start, stop in context.spans:
            if start < stop:
                mask = stock(**{**kwargs, "q_length": stop - start, "q_offset": start})
                assert mask is not None
                rows.append(functional.pad(mask, (0, 0, 0, context.piece_length - stop + start)))
        if not rows:  # a rank that has padding alone
            mask = stock(**{**kwargs, "q_length": 1, "q_offset": 0})
            assert mask is not None
            rows.append(mask)
        are_equal = all(mask.stride(0) == 0 for mask in rows)  # an expanded batch dimension
        joined = torch.cat([mask[:1] for mask in rows] if are_equal else rows, 2)
        missing = context.local_length - joined.shape[2]
        return functional.pad(joined, (0, 0, 0, missing)).expand(len(rows[0]), -1, -1, -1)


def _has_rows(part: Slice | None, kwargs: dict[str, Any]) -> bool:
    """Return True if the shape of a mask will show if it is whole or has only this rank's rows."""
    assert part is not None and part.cp_slice is not None
    lengths = [int(kwargs[name]) for name in ("q_length", "kv_length")]
    is_whole = lengths == [part.length] * 2 and int(kwargs.get("q_offset", 0)) == 0
    return is_whole and part.documents is None and 1 < part.cp_slice.local_length < part.length


def _is_left_out(stock: Callable[..., Tensor | None], kwargs: dict[str, Any]) -> bool:
    """Return True if the stock function returns None because attention needs no mask.

    A batch with padding always needs a mask. Otherwise the stock function is called with two tokens
    instead of the batch. Their window is longer than two tokens if the window of the batch is
    longer than its rows.
    """
    if not (kwargs.get("allow_is_causal_skip") or kwargs.get("allow_is_bidirectional_skip")):
        return False
    padding, window = kwargs.get("attention_mask"), kwargs.get("local_size")
    if padding is not None and not bool(padding.all()):
        return False
    two = {"batch_size": 1, "q_length": 2, "kv_length": 2, "attention_mask": None}
    if window is not None:
        two["local_size"] = 2 if kwargs["kv_length"] >= window else 3
    return stock(**{**kwargs, **two, "mask_function": _sees_earlier, "use_vmap": False}) is None


def _sees_earlier(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


class BeginMasks(PackageHook):
    """Pre-forward hook of a module that builds masks, which sets the slice of this forward."""

    def __init__(self, rows: MaskRows) -> None:
        self.rows = rows

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows.part = kwargs.get(SLICE)


def attach_mask_rows(parts: Parts, state: ModelState) -> None:
    """Give the modules around the decoder layers a config that selects `MaskRows`."""
    in_mixers = {m for mixers in parts.mixers for child in mixers.values() for m in child.modules()}
    if not in_mixers.isdisjoint(parts.attention):
        return
    layers = set(parts.layers)
    rows = MaskRows()
    for module in parts.root.modules():
        config = getattr(module, "config", None)
        if module is parts.root or module in layers or not builds_dense_masks(config):
            continue
        if layers.isdisjoint(module.modules()):
            continue
        state.replace(module, "config", make_mask_config(config, rows))
        module.register_forward_pre_hook(BeginMasks(rows), with_kwargs=True)
        module.register_forward_hook(EndForward(rows), always_call=True)
