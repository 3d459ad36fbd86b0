"""Ring attention: send keys and values from cp rank to cp rank while attention is computed.

An all-gather stores the keys and values of the whole sequence on every rank. If an attention
function returns its log-sum-exp (`partial_attention.py`), a rank can instead attend to the tokens
of one rank at a time. With cp 4, rank 1 has the keys of these ranks:

    step           0          1          2          3
    attends to     rank 1     rank 0     rank 3     rank 2
    receives       rank 0     rank 3     rank 2     -            from rank 0, while it attends

In zigzag order each rank has two pieces of the sequence. Each step therefore computes up to four
pairs of a query piece and a key piece, and skips a pair in which no query sees a key: with a causal
mask 3 pairs remain at step 0 and 2 at every other step, on every rank.

Backward sends keys and values around the ring again. Each rank adds its contribution to the
gradients that it receives, and passes the sum on until the sum reaches the owner of the keys. A
rank computes half of its own pairs in the first step and half in the last one, while the last
gradients are sent:

    step           0          1          2          3          4
    attends to     rank 1     rank 0     rank 3     rank 2     rank 1     computed again
    receives       rank 0     rank 3     rank 2     -          -          keys and values
    receives       -          -          rank 3     rank 2     rank 1     gradients from rank 0

Only the keys and values of this rank are saved for backward. With kv key heads of width d, a rank
sends (cp - 1) * 2 * kv * d values per token of its slice in forward and twice as many in backward,
like an all-gather. Half of the values in backward are gradients in fp32: 4 bytes each, where an
all-gather of bf16 sends 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_moe_ep.ranks.collectives import Transfer, send_to_next
from hf_moe_ep.sequence.partial_attention import (
    QueryKeyRange,
    ScoreOptions,
    attend_to_part,
    compute_once,
    compute_part_grads,
    merge_parts,
)
from hf_moe_ep.sequence.slices import Slice

# These tags distinguish messages with keys and values from messages with their gradients.
_KEYS, _GRADIENTS = 0, 1


@dataclass(frozen=True)
class _Pair:
    """A query piece and a key piece, where at least one of the queries sees a key.

    Attributes:
        queries, keys: the positions of each piece among the tokens of the rank that has it.
        box: the positions of the two pieces in the whole sequence.
    """

    queries: slice
    keys: slice
    box: QueryKeyRange


def attend_by_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: ScoreOptions,
    sinks: Tensor | None,
    context: Slice,
) -> Tensor:
    """Return the attention (B, S / cp, Q, W) of this rank's queries to the keys of all ranks.

    Args:
        query, key, value: (B, heads, S / cp, W) of this rank's tokens, padding included.
        sinks: one score per head for a key without a value, or None.
    """
    out_BSQW: Tensor
    out_BSQW, lse_BQS = _Ring.apply(query, key, value, scores, context)
    if sinks is None:
        return out_BSQW
    shares_BQS = torch.sigmoid(lse_BQS - sinks.view(1, -1, 1).to(lse_BQS.dtype))
    return (out_BSQW * shares_BQS.transpose(1, 2).unsqueeze(-1)).to(query.dtype)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: ScoreOptions, context: Slice
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(query.dtype, torch.float32)
        rows, heads, tokens, _ = query.shape
        # The output projection reads and saves this layout, so it makes no copy.
        out_BSQW = query.new_zeros((rows, tokens, heads, value.shape[-1]), dtype=dtype)
        out = out_BSQW.transpose(1, 2)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for owner, keys, values in _circulate(key, value, context):
            for pair in _list_pairs(owner, scores, context):
                part = attend_to_part(
                    query[:, :, pair.queries],
                    keys[:, :, pair.keys],
                    values[:, :, pair.keys],
                    scores,
                    pair.box,
                    context.computed,
                )
                so_far = out[:, :, pair.queries], lse[:, :, pair.queries]
                out[:, :, pair.queries], lse[:, :, pair.queries] = merge_parts(*so_far, *part)
        ctx.scores, ctx.context = scores, context
        out_BSQW = out_BSQW.to(query.dtype)
        ctx.save_for_backward(query, key, value, out_BSQW, lse)
        return out_BSQW, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BSQW: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_BSQW, lse = ctx.saved_tensors
        out, grad_out = (x.transpose(1, 2).to(lse.dtype) for x in (out_BSQW, grad_out_BSQW))
        scores, context = ctx.scores, ctx.context
        grad_query = torch.zeros_like(query, dtype=out.dtype)
        widths = [key.shape[-1], value.shape[-1]]

        def add_grads(grad_kv: Tensor, keys: Tensor, values: Tensor, pairs: list[_Pair]) -> None:
            """Add the gradients of these pairs to `grad_query` and `grad_kv`."""
            grad_keys, grad_values = grad_kv.split(widths, -1)
            for pair in pairs:
                rows, columns = (slice(None), slice(None), pair.queries), pair.keys
                grads = compute_part_grads(
                    query[rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    (out[rows], lse[rows]),
                    (grad_out[rows], grad_lse[rows]),
                    partial(attend_to_part, scores=scores, box=pair.box, computed=context.computed),
                )
                grad_query[rows] += grads[0]
                grad_keys[:, :, columns] += grads[1]
                grad_values[:, :, columns] += grads[2]

        shape = (*key.shape[:3], sum(widths))
        grad_own = key.new_zeros(shape, dtype=out.dtype)
        own_pairs = _list_pairs(context.rank, scores, context)
        middle = -(-len(own_pairs) // 2)
        arriving: Transfer | None = None
        for owner, keys, values in _circulate(key, value, context):
            if owner == context.rank:
                add_grads(grad_own, keys, values, own_pairs[:middle])
                continue
            grad_kv = key.new_zeros(shape, dtype=out.dtype)
            add_grads(grad_kv, keys, values, _list_pairs(owner, scores, context))
            if arriving is not None:
                grad_kv += arriving.wait()
            arriving = send_to_next(grad_kv, context.group, tag=_GRADIENTS)
        assert arriving is not None, "a ring has at least two ranks"
        add_grads(grad_own, key, value, own_pairs[middle:])
        grad_own += arriving.wait()
        grad_key, grad_value = grad_own.split(widths, -1)
        grad_key, grad_value = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None


def _circulate(key: Tensor, value: Tensor, context: Slice) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the cp ranks in the order of the steps, with their keys and values.

    The next keys and values are received while the caller uses the current ones.
    """
    widths = [key.shape[-1], value.shape[-1]]
    packed = torch.cat([key, value], -1)
    for step in range(context.size):
        is_last = step == context.size - 1
        transfer = None if is_last else send_to_next(packed, context.group, tag=_KEYS)
        keys, values = packed.split(widths, -1)
        yield (context.rank - step) % context.size, keys, values
        if transfer is not None:
            packed = transfer.wait()


def _list_pairs(owner: int, scores: ScoreOptions, context: Slice) -> list[_Pair]:
    """List the pairs of this rank's query pieces and the key pieces of the rank `owner`."""
    seen = _find_seen_pairs(scores, context)
    own, others = context.spans_of(context.rank), context.spans_of(owner)
    return [
        _Pair(
            slice(i * context.piece_length, i * context.piece_length + q_stop - q_start),
            slice(j * context.piece_length, j * context.piece_length + k_stop - k_start),
            QueryKeyRange(q_start, q_stop, k_start, k_stop),
        )
        for i, (q_start, q_stop) in enumerate(own)
        for j, (k_start, k_stop) in enumerate(others)
        if q_start < q_stop and (q_start, k_start) in seen
    ]


def _find_seen_pairs(scores: ScoreOptions, context: Slice) -> set[tuple[int, int]]:
    """Return (first query, first key) of each pair of pieces in which a query may see a key.

    A block of the BlockMask has many tokens, and only some of them may be in the pieces. Pairs may
    therefore be listed in which no query sees a key.
    """

    def find() -> set[tuple[int, int]]:
        blocks = scores.mask.to_dense().flatten(0, -3).any(0).cpu()
        query_block, key_block = scores.mask.BLOCK_SIZE
        spans = context.list_all_spans()
        return {
            (q_start, k_start)
            for q_start, q_stop in spans
            for k_start, k_stop in spans
            if blocks[
                q_start // query_block : -(-q_stop // query_block),
                k_start // key_block : -(-k_stop // key_block),
            ].any()
        }

    return compute_once(context.computed, ("seen pieces",), scores.mask, find)
