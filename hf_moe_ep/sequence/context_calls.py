"""Plan the calls of stock attention code for the queries of one piece of a sequence.

A call computes the attention of the queries `start` to `stop` - 1 to the keys `first` to
`last` - 1. Which keys these are, and how stock code learns which query sees which key, depends on
the attention function:

    a mask (B or 1, 1, S, S)    The call gets the mask's rows of its queries, and all keys from the
                                first to the last key that one of its queries sees. A sliding
                                window therefore costs as much as in stock code. There is one host
                                sync per mask and forward.
    a mask of this rank's rows  The call gets the same. The ranks exchange the indices of the first
    (mask_rows.py)              and last keys by an all-gather.
    a BlockMask                 The call gets a BlockMask of its queries, with the same mask
                                function, and all keys from the first to the last block that one of
                                its queries sees.
    sdpa without a mask         The call gets torch's causal_lower_right, which GPU kernels apply
                                without building a mask. A model that is not causal gets no mask.
    others without a mask       The call gets the rows of a causal mask. A model that is not causal
                                gets no mask.
    eager without a mask        The call gets all keys and no mask.
    flash attention             The call gets the padding mask (B, S) of its keys, if there is one.
                                Flash attention aligns the last query with the last key, so causal
                                masks and windows are right if the keys end with the queries. For a
                                packed row the call gets, for each document with some of its
                                queries, these queries and the document's keys up to the last of
                                these queries.
    flash attention that is     The queries are padded to the length of the keys, because the last
    not causal, and has a       query does not belong to the last key.
    window, a mask or documents

Without a mask, stock code itself makes the causal mask of the piece at the start of the sequence.
Every rank plans the calls of all ranks, so it knows which keys and values the other ranks need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask

from hf_moe_ep.ranks.collectives import gather_counts
from hf_moe_ep.sequence.packed_rows import check_packed_flash, find_documents
from hf_moe_ep.sequence.partial_attention import QueryKeyRange, compute_once, slice_block_mask
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.upstream.attention_interface import is_eager, uses_flash_attention, uses_sdpa
from hf_moe_ep.upstream.autograd_modes import hidden_from_modes

_LENGTH_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# This attribute of an attention module has the name of the module in the model, for errors.
MODULE_PATH = "_hf_moe_ep_path"
# (first token, last token + 1) of each document.
_Documents = list[tuple[int, int]]


@dataclass(frozen=True)
class Call:
    """A call of stock attention code for queries `start` to `stop` - 1, keys `first` to `last` - 1.

    Attributes:
        build_mask: returns the mask that stock code gets, or None. Only the rank that runs the call
            builds the mask.
        kwargs: the other arguments of stock code.
        pads_queries: True if the queries are padded to the length of the keys.
    """

    start: int
    stop: int
    first: int
    last: int
    build_mask: Callable[[], Any]
    kwargs: dict[str, Any]
    pads_queries: bool = False

    @property
    def mask(self) -> Any:
        """The mask of these queries and keys, or None."""
        return self.build_mask()


@dataclass(frozen=True)
class _Layer:
    """The arguments of one call of an attention layer, for whole sequences."""

    module: Any
    mask: Any
    kwargs: dict[str, Any]
    rows: int
    device: torch.device
    context: Slice

    @property
    def name(self) -> str:
        return str(getattr(self.module, MODULE_PATH, type(self.module).__name__))

    @property
    def is_causal(self) -> bool:
        given = self.kwargs.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)

    def compute_once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the value that this forward has computed from the mask before, or compute it."""
        return compute_once(self.context.computed, key, self.mask, compute)


def plan_calls(
    module: Any,
    mask: Any,
    context: Slice,
    kwargs: dict[str, Any],
    rows: int,
    device: torch.device,
) -> list[list[Call]]:
    """Plan one call for each piece, with at least one query, of every rank of the cp group.

    Args:
        module: the attention module, with its stock config.
        mask, kwargs: the arguments of the attention function, for the whole sequence.
        rows: the number of rows in the batch.

    Raises:
        ValueError: the arguments include a position_bias; the mask does not have one row per query
            and is not a mask of flash attention; or a packed batch has several rows.
    """
    layer = _Layer(module, mask, kwargs, rows, device, context)
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{layer.name} adds a position_bias to its scores, which cp_size={context.size} does "
            f"not split; leave cp_size at 1"
        )
    plan = _plan_flash_call if uses_flash_attention(module) else _plan_call
    return [
        [plan(layer, start, stop) for start, stop in context.spans_of(rank) if start < stop]
        for rank in range(context.size)
    ]


def _plan_call(layer: _Layer, start: int, stop: int) -> Call:
    mask, context = layer.mask, layer.context
    call = Call(start, stop, 0, context.length, lambda: None, layer.kwargs)
    if isinstance(mask, BlockMask):
        bounds = layer.compute_once(("blocks",), lambda: _find_seen_blocks(mask, context))
        first, last = bounds[start]
        box = QueryKeyRange(start, stop, first, last)
        build = partial(layer.compute_once, ("block", start), partial(slice_block_mask, mask, box))
        return replace(call, first=first, last=last, build_mask=build)
    if isinstance(mask, Tensor) and mask.ndim == 4 and _has_own_rows(mask, context):
        bounds = layer.compute_once(("seen",), lambda: _gather_seen_keys(mask, context))
        first, last = bounds[start]
        return replace(
            call,
            first=first,
            last=last,
            build_mask=lambda: _take_own_rows(mask, start, stop, context)[..., first:last],
        )
    if isinstance(mask, Tensor) and mask.ndim == 4:
        query_rows = mask.expand(-1, -1, context.length, -1)  # one row may apply to all queries
        bounds = layer.compute_once(("seen",), lambda: _find_seen_keys(query_rows, context))
        first, last = bounds[start]
        rows = query_rows[:, :, start:stop, first:last]  # a view
        return replace(call, first=first, last=last, build_mask=lambda: rows)
    if mask is not None:
        shape = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the attention_mask of {layer.name} ({shape}) has no row for each query, so cp_size="
            f"{context.size} cannot slice it; load the model with attn_implementation='sdpa', or "
            f"leave cp_size at 1"
        )
    if is_eager(layer.module) or not layer.is_causal:
        return call
    if start == 0 or stop - start == 1:
        # If there are as many queries as keys, stock code makes a causal mask itself. A single
        # query sees all keys up to its own key.
        return replace(call, last=stop)
    if uses_sdpa(layer.module):
        return replace(call, last=stop, build_mask=partial(_mask_lower_right, stop - start, stop))

    def make_causal_mask() -> Tensor:
        ones = torch.ones(1, 1, stop - start, stop, dtype=torch.bool, device=layer.device)
        return ones.tril(start)

    build = partial(layer.compute_once, ("causal", start), make_causal_mask)
    return replace(call, last=stop, build_mask=build)


def _mask_lower_right(queries: int, keys: int) -> Any:
    """Return torch's mask that aligns the last query with the last key.

    Torch cannot create this subclass of a tensor inside a dispatch mode, for example in selective
    activation checkpointing.
    """
    with hidden_from_modes():
        return causal_lower_right(queries, keys)


def _find_seen_blocks(mask: BlockMask, context: Slice) -> dict[int, tuple[int, int]]:
    """Map the first query of each piece to (first key, last key + 1) of the seen key blocks."""
    blocks = mask.to_dense().flatten(0, -3).any(0).cpu()
    query_block, key_block = mask.BLOCK_SIZE
    bounds = {}
    for start, stop in context.list_all_spans():
        seen_blocks = blocks[start // query_block : -(-stop // query_block)].any(0)
        seen = seen_blocks.nonzero().flatten().tolist() or [0]
        last = min((seen[-1] + 1) * key_block, context.length)
        bounds[start] = seen[0] * key_block, last
    return bounds


def _has_own_rows(mask: Tensor, context: Slice) -> bool:
    """Return True if a mask has only the rows of this rank (mask_rows.py)."""
    return context.has_mask_rows and mask.shape[2] == context.local_length


def _take_own_rows(mask: Tensor, start: int, stop: int, context: Slice) -> Tensor:
    """Return the rows `start` to `stop` - 1 of a mask that has only the rows of this rank."""
    first = list(context.piece_numbers).index(start // context.piece_length) * context.piece_length
    return mask[:, :, first : first + stop - start]


def _gather_seen_keys(mask: Tensor, context: Slice) -> dict[int, tuple[int, int]]:
    """Return the result of `_find_seen_keys` for a mask that has only the rows of this rank."""
    own = mask.new_zeros(len(context.piece_numbers), 2, dtype=torch.int64)
    for index, (start, stop) in enumerate(context.spans):
        if start < stop:
            own[index] = _count_unseen_keys(_take_own_rows(mask, start, stop, context))
    by_rank = gather_counts(own.flatten(), context.group, where="masks of context parallelism")
    return {
        start: (numbers[2 * index], context.length - numbers[2 * index + 1])
        for rank, numbers in enumerate(by_rank)
        for index, (start, stop) in enumerate(context.spans_of(rank))
        if start < stop
    }


def _find_seen_keys(mask: Tensor, context: Slice) -> dict[int, tuple[int, int]]:
    """Map the first query of each piece to (first, last + 1) of the keys that its queries see."""
    spans = context.list_all_spans()
    counts = [_count_unseen_keys(mask[:, :, start:stop]) for start, stop in spans]
    unseen_counts = torch.stack(counts).tolist()
    return {
        start: (num_before, context.length - num_after)
        for (start, _), (num_before, num_after) in zip(spans, unseen_counts, strict=True)
    }


def _count_unseen_keys(mask: Tensor) -> Tensor:
    """Return int64 [2]: the number of keys before the first seen key and after the last one.

    If a query sees no key, stock code may return the mean of all values for it. The result is then
    [0, 0], so its piece gets all keys, as in stock code.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    is_seen = seen.flatten(0, 2).any(0).to(torch.uint8)
    return torch.stack([is_seen.argmax(), is_seen.flip(0).argmax()]) * seen.any(-1).all()


def _plan_flash_call(layer: _Layer, start: int, stop: int) -> Call:
    mask, context, causal = layer.mask, layer.context, layer.is_causal
    documents = layer.compute_once(("documents",), lambda: _find_flash_documents(layer))
    window = layer.kwargs.get("sliding_window")
    first, last = 0, stop if causal else context.length
    if window is not None:
        first = max(0, start - window + 1)
        last = stop if causal else min(context.length, stop + window - 1)
    pads_queries = not causal and (last - first, stop - start) != (context.length,) * 2
    pads_queries &= any(x is not None for x in (window, mask, documents))
    kwargs = {n: x for n, x in layer.kwargs.items() if n not in (*_LENGTH_NAMES, "position_ids")}
    if documents is not None:
        inside = [(max(a, first), min(b, last)) for a, b in documents if a < stop and b > start]
        first, last = inside[0][0], inside[-1][1]
        queries = inside if pads_queries else [(max(a, start), min(b, stop)) for a, b in inside]
        lengths = partial(_make_lengths, queries, inside, layer.device)
        kwargs |= layer.compute_once(("lengths", start, first, last, pads_queries), lengths)
    elif mask is not None:
        mask = mask[:, first:last]
    return Call(start, stop, first, last, lambda: mask, kwargs, pads_queries)


def _make_lengths(queries: _Documents, keys: _Documents, device: torch.device) -> dict[str, Any]:
    """Make the arguments that describe the documents of queries and keys to flash attention."""
    lengths: dict[str, Any] = {}
    for side, bounds in (("q", queries), ("k", keys)):
        sizes = [stop - start for start, stop in bounds]
        ends = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
        lengths |= {f"cu_seq_lens_{side}": ends, f"max_length_{side}": max(sizes)}
    return lengths


def _find_flash_documents(layer: _Layer) -> _Documents | None:
    """Find the documents of a packed row as flash attention does; return None if not packed."""
    if layer.mask is not None:
        return None
    ends = layer.kwargs.get("cu_seq_lens_q")
    if ends is not None:
        numbers = ends.tolist()
        documents = [list(pairwise(numbers))]
    else:
        positions = layer.kwargs.get("position_ids")
        documents = find_documents(positions, layer.rows, at_gaps=False) or []
    if documents:
        check_packed_flash(layer.rows)
    return documents[0] if documents else None
