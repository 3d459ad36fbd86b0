"""Plan the calls of stock attention code for the queries of one piece of a sequence.

A call computes the attention of the queries `start` to `stop` - 1 to the keys `first` to
`last` - 1. Which keys these are, and how stock code learns which query sees which key, depends on
the attention function:

    a mask (B or 1, 1, S, S)    its rows of the queries and its columns of the keys. The keys are
                                those between the first and the last one that any query sees, so a
                                sliding window costs as much as in stock code. One host sync per
                                mask and forward
    a mask of this rank's rows  the same; ranks tell each other the first and the last key
    (mask_rows.py)
    a BlockMask                 a BlockMask of these queries, with the same function. The keys are
                                those of the blocks that any query sees
    sdpa without a mask         torch's causal_lower_right, with which the kernels of a GPU need no
                                mask; nothing if the model is not causal
    others without a mask       the rows of a causal mask; none if the model is not causal
    eager without a mask        all keys
    flash attention             no mask. It aligns the last query with the last key, so causal
                                masks and windows are right if the keys end with the queries.
                                Padding masks (B, S) are sliced. From each document of a packed
                                row a call gets its queries and all keys up to the last of them
    flash attention that is     the queries are padded to the length of the keys, since the last
    not causal, with a window,  query is not that of the last key
    a mask or documents

Every rank plans the calls of all ranks, so it knows which keys and values the others need.
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
from hf_moe_ep.sequence.partial_attention import QueryKeyRange, once, slice_block_mask
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.upstream.attention_interface import is_eager, uses_flash_attention, uses_sdpa
from hf_moe_ep.upstream.autograd_modes import hidden_from_modes

_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# The attribute of an attention module that has its name in the model, for errors.
MODULE_PATH = "_hf_moe_ep_path"
# The first and the last token + 1 of each document.
_Documents = list[tuple[int, int]]


@dataclass(frozen=True)
class Call:
    """One call of stock attention code: queries `start` to `stop` - 1, keys `first` to `last` - 1.

    Attributes:
        build_mask: returns the mask that stock code gets; only the rank that runs a call builds it.
        kwargs: other arguments of stock code.
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

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what was computed from this mask before in this forward, or compute it."""
        return once(self.context.computed, key, self.mask, compute)


def plan_calls(
    module: Any,
    mask: Any,
    context: Slice,
    kwargs: dict[str, Any],
    rows: int,
    device: torch.device,
) -> list[list[Call]]:
    """Plan the calls of every rank of the cp group, one for each of its pieces with queries.

    Args:
        module: the attention module, with its stock config.
        mask, kwargs: the arguments of the attention function for the whole sequence.
        rows: the number of rows in the batch.

    Raises:
        ValueError: an argument other than the mask has one entry per pair of tokens.
    """
    layer = _Layer(module, mask, kwargs, rows, device, context)
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{layer.name} adds a position_bias to its scores, which cp_size={context.size} does "
            f"not split; leave cp_size at 1"
        )
    plan = _plan_flash if uses_flash_attention(module) else _plan
    return [
        [plan(layer, start, stop) for start, stop in context.spans_of(rank) if start < stop]
        for rank in range(context.size)
    ]


def _plan(layer: _Layer, start: int, stop: int) -> Call:
    mask, context = layer.mask, layer.context
    call = Call(start, stop, 0, context.length, lambda: None, layer.kwargs)
    if isinstance(mask, BlockMask):
        first, last = layer.once(("blocks",), lambda: _find_seen_blocks(mask, context))[start]
        box = QueryKeyRange(start, stop, first, last)
        build = partial(layer.once, ("block", start), partial(slice_block_mask, mask, box))
        return replace(call, first=first, last=last, build_mask=build)
    if isinstance(mask, Tensor) and mask.ndim == 4 and _has_own_rows(mask, context):
        first, last = layer.once(("seen",), lambda: _gather_seen_keys(mask, context))[start]
        return replace(
            call,
            first=first,
            last=last,
            build_mask=lambda: _own_rows(mask, start, stop, context)[..., first:last],
        )
    if isinstance(mask, Tensor) and mask.ndim == 4:
        of_queries = mask.expand(-1, -1, context.length, -1)  # one row may be that of all queries
        seen = layer.once(("seen",), lambda: _find_seen_keys(of_queries, context))
        first, last = seen[start]
        rows = of_queries[:, :, start:stop, first:last]  # a view
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
        # Stock code masks as many queries as keys by itself, and a single query sees all keys.
        return replace(call, last=stop)
    if uses_sdpa(layer.module):
        return replace(call, last=stop, build_mask=partial(_mask_lower_right, stop - start, stop))

    def make() -> Tensor:
        ones = torch.ones(1, 1, stop - start, stop, dtype=torch.bool, device=layer.device)
        return ones.tril(start)

    return replace(call, last=stop, build_mask=partial(layer.once, ("causal", start), make))


def _mask_lower_right(queries: int, keys: int) -> Any:
    """Return torch's mask that aligns the last query with the last key.

    Torch cannot create this subclass of a tensor inside of a dispatch mode, such as that of
    selective activation checkpointing.
    """
    with hidden_from_modes():
        return causal_lower_right(queries, keys)


def _find_seen_blocks(mask: BlockMask, context: Slice) -> dict[int, tuple[int, int]]:
    """Map the first query of each piece to (first key, last key + 1) of the blocks that it sees."""
    blocks = mask.to_dense().flatten(0, -3).any(0).cpu()
    query_block, key_block = mask.BLOCK_SIZE
    bounds = {}
    for start, stop in (s for rank in range(context.size) for s in context.spans_of(rank)):
        if start < stop:
            of_queries = blocks[start // query_block : -(-stop // query_block)].any(0)
            seen = of_queries.nonzero().flatten().tolist() or [0]
            last = min((seen[-1] + 1) * key_block, context.length)
            bounds[start] = seen[0] * key_block, last
    return bounds


def _has_own_rows(mask: Tensor, context: Slice) -> bool:
    """Return True if a mask has only the rows of this rank (mask_rows.py)."""
    return context.has_mask_rows and mask.shape[2] == context.local


def _own_rows(mask: Tensor, start: int, stop: int, context: Slice) -> Tensor:
    """Return the rows `start` to `stop` - 1 of a mask that has only the rows of this rank."""
    first = list(context.pieces).index(start // context.piece) * context.piece
    return mask[:, :, first : first + stop - start]


def _gather_seen_keys(mask: Tensor, context: Slice) -> dict[int, tuple[int, int]]:
    """Return what `_find_seen_keys` does, for a mask that has only the rows of this rank."""
    own = mask.new_zeros(len(context.pieces), 2, dtype=torch.int64)
    for place, (start, stop) in enumerate(context.spans):
        if start < stop:
            own[place] = _bounds_of_seen(_own_rows(mask, start, stop, context))
    by_rank = gather_counts(own.flatten(), context.group, where="masks of context parallelism")
    return {
        start: (numbers[2 * place], context.length - numbers[2 * place + 1])
        for rank, numbers in enumerate(by_rank)
        for place, (start, stop) in enumerate(context.spans_of(rank))
        if start < stop
    }


def _find_seen_keys(mask: Tensor, context: Slice) -> dict[int, tuple[int, int]]:
    """Map the first query of each piece to (first key, last key + 1) that its queries see."""
    spans = [s for rank in range(context.size) for s in context.spans_of(rank) if s[0] < s[1]]
    bounds = [_bounds_of_seen(mask[:, :, start:stop]) for start, stop in spans]
    firsts_and_behinds = torch.stack(bounds).tolist()
    return {
        start: (first, context.length - behind)
        for (start, _), (first, behind) in zip(spans, firsts_and_behinds, strict=True)
    }


def _bounds_of_seen(mask: Tensor) -> Tensor:
    """Return the numbers of keys in front of and behind those that queries see, int64 [2].

    If a query sees no key, stock code may give it the mean of all values. Its piece therefore gets
    all keys, as in stock code.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    is_seen = seen.flatten(0, 2).any(0).to(torch.uint8)
    return torch.stack([is_seen.argmax(), is_seen.flip(0).argmax()]) * seen.any(-1).all()


def _plan_flash(layer: _Layer, start: int, stop: int) -> Call:
    mask, context, causal = layer.mask, layer.context, layer.is_causal
    documents = layer.once(("documents",), lambda: _find_flash_documents(layer))
    window = layer.kwargs.get("sliding_window")
    first, last = 0, stop if causal else context.length
    if window is not None:
        first = max(0, start - window + 1)
        last = stop if causal else min(context.length, stop + window - 1)
    pads_queries = not causal and (last - first, stop - start) != (context.length,) * 2
    pads_queries &= any(x is not None for x in (window, mask, documents))
    kwargs = {n: x for n, x in layer.kwargs.items() if n not in (*_LENGTHS, "position_ids")}
    if documents is not None:
        inside = [(max(a, first), min(b, last)) for a, b in documents if a < stop and b > start]
        first, last = inside[0][0], inside[-1][1]
        queries = inside if pads_queries else [(max(a, start), min(b, stop)) for a, b in inside]
        lengths = partial(_lengths, queries, inside, layer.device)
        kwargs |= layer.once(("lengths", start, first, last, pads_queries), lengths)
    elif mask is not None:
        mask = mask[:, first:last]
    return Call(start, stop, first, last, lambda: mask, kwargs, pads_queries)


def _lengths(queries: _Documents, keys: _Documents, device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell flash attention the documents of its queries and keys."""
    lengths: dict[str, Any] = {}
    for side, bounds in (("q", queries), ("k", keys)):
        sizes = [stop - start for start, stop in bounds]
        ends = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
        lengths |= {f"cu_seq_lens_{side}": ends, f"max_length_{side}": max(sizes)}
    return lengths


def _find_flash_documents(layer: _Layer) -> _Documents | None:
    """Return the documents of a packed row, which flash attention finds by positions or lengths."""
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
