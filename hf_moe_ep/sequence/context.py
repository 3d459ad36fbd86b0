"""Context parallelism: compute attention of this rank's queries to the keys of all cp ranks.

Each cp rank keeps the queries of its own tokens, and receives keys and values of the other ranks.
Key and value heads are sent before they are repeated for the query heads. With cp 2 and 16 tokens
in zigzag order (`slices.py`), stock attention code runs twice per rank:

    rank 0    queries 0-3     keys 0-3          queries 12-15    keys 0-15
    rank 1    queries 4-7     keys 0-7          queries 8-11     keys 0-11

Each call gets only the keys that its queries can see, so both ranks compute the same number of
scores. `context_calls.py` plans the calls. If a rank needs all keys, keys and values are
all-gathered (`slices.py`), or sent from rank to rank if the model uses FlexAttention, which returns
its log-sum-exp (`ring.py`). Otherwise, with sliding windows or with packed documents, each rank
sends a piece only to the ranks that need it:

    window of 4      rank 0 needs tokens 0-3, 9-15    from rank 1: 8-11
                     rank 1 needs tokens 1-11         from rank 0: 0-3

Latent attention gathers its latents before it computes keys and values (`latent_cache.py`).

For kv heads of width d, an all-gather sends (cp - 1) * 2 * kv * d values per token of a slice in
forward, and as many gradients in backward. A rank saves only its own queries, keys and values for
backward, which gathers keys and values again and computes the attention a second time (under
activation checkpointing, as a part of the layer). There are two exceptions, which keep the keys and
values of the whole sequence until backward: flash attention, and latent attention, whose keys and
values are computed from the gathered latents.

`torch.distributed.tensor.experimental.context_parallel` is not used. It is a prototype that
replaces scaled_dot_product_attention for the whole process and reorders buffers in place. It
accepts no mask, so it excludes padding, packed documents and windows, and it supports no other
attention function, such as one with sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.sequence.context_calls import Call, plan_calls
from hf_moe_ep.sequence.partial_attention import ScoreOptions
from hf_moe_ep.sequence.ring import attend_by_ring
from hf_moe_ep.sequence.slices import Slice, gather_slices
from hf_moe_ep.upstream.attention_interface import uses_flash_attention, uses_flex_attention
from hf_moe_ep.upstream.autograd_modes import backward_is_running, saved_tensors_are_hooked


def attend(
    stock: Callable[..., Any],
    module: Any,
    query: Tensor,  # (B, Q, S / cp, W)
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    context: Slice,
    gather: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Return the attention (B, S / cp, Q, W) of this rank's queries to all keys.

    Args:
        stock: the attention function of the model.
        module: the attention module, with its stock config.
        attention_mask: the mask of the whole sequence, or only this rank's rows of it
            (mask_rows.py).
        gather: False if `key` and `value` already have all tokens (latent_cache.py).
        kwargs: other arguments of `stock`, with the `position_ids` of the whole sequence.

    Raises:
        ValueError: FlexAttention was asked for dropout, which it does not have.
    """
    by_rank = plan_calls(module, attention_mask, context, kwargs, len(query), query.device)
    if gather and uses_flex_attention(module) and isinstance(attention_mask, BlockMask):
        if kwargs.get("dropout"):
            raise ValueError(
                f"FlexAttention has no dropout, and attention_dropout is {kwargs['dropout']}; set "
                f"config.attention_dropout = 0, or load the model with attn_implementation='sdpa'"
            )
        needed = [_list_pieces(calls, context.piece) for calls in by_rank]
        if _needs_all_keys(needed, context):
            cap, scale, options = map(kwargs.get, ("softcap", "scaling", "kernel_options"))
            scores = ScoreOptions(attention_mask, scale, cap, options)
            return attend_by_ring(query, key, value, scores, kwargs.get("s_aux"), context)
    run = partial(_attend_to_gathered, stock, module, by_rank, context, gather, kwargs)
    if gather and not uses_flash_attention(module) and _saves_for_backward():
        # Stock code would save a copy of the keys and values of the whole sequence for each call.
        draws = bool(kwargs.get("dropout"))
        out: Tensor = checkpoint(
            run, query, key, value, use_reentrant=False, preserve_rng_state=draws
        )
        return out
    return run(query, key, value)


def _saves_for_backward() -> bool:
    """Return True if autograd saves the tensors of this forward outside any checkpoint."""
    return torch.is_grad_enabled() and not saved_tensors_are_hooked() and not backward_is_running()


def _attend_to_gathered(
    stock: Callable[..., Any],
    module: Any,
    by_rank: Sequence[Sequence[Call]],
    context: Slice,
    gather: bool,
    kwargs: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    pieces: Sequence[int] = range(_num_pieces(context))
    if gather:
        pieces, key, value = _fetch_keys_and_values(key, value, context, by_rank)
    calls = iter(by_rank[context.rank])
    outs = []
    for (start, stop), queries in zip(context.spans, query.split(context.piece, 2), strict=True):
        if start < stop:
            call = next(calls)
            # The received keys are whole pieces. The keys of one call follow each other.
            piece, offset = divmod(call.first, context.piece)
            first = pieces.index(piece) * context.piece + offset
            seen = slice(first, first + call.last - call.first)
            args = queries[:, :, : stop - start], key[:, :, seen], value[:, :, seen]
            outs.append(_run(stock, module, call, *args))
    # On a rank without tokens, only these empty tensors connect the output with queries, values and
    # sinks, and with keys, which are exchanged together with values. Such a rank needs gradients as
    # well, because all ranks take part in FSDP2's reductions and in this exchange. The squares save
    # tensors for backward, whichever of queries and values need gradients. Without saved tensors
    # torch does not recompute a checkpoint, and this rank would miss the exchange inside it.
    size = (len(query), 0, query.shape[1], value.shape[-1])
    sinks = kwargs.get("s_aux")
    empty = [x.transpose(1, 2).square() for x in (query[:, :, :0, :1], value[:, :1, :0])]
    empty += [] if sinks is None else [sinks.view(1, 1, -1, 1)[:, :0].to(value.dtype)]
    out_BSQW = torch.cat([*outs, *(x.expand(size) for x in empty)], 1)
    return functional.pad(out_BSQW, (0, 0, 0, 0, 0, context.local - out_BSQW.shape[1]))


def _run(
    stock: Callable[..., Any], module: Any, call: Call, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    if call.pads_queries:
        before, behind = call.start - call.first, call.last - call.stop
        padded = functional.pad(query, (0, 0, before, behind))
        out: Tensor = stock(module, padded, key, value, call.mask, **call.kwargs)[0]
        return out[:, before : before + query.shape[2]]
    out = stock(module, query, key, value, call.mask, **call.kwargs)
    return out[0]


def _fetch_keys_and_values(
    key: Tensor, value: Tensor, context: Slice, by_rank: Sequence[Sequence[Call]]
) -> tuple[Sequence[int], Tensor, Tensor]:
    """Send this rank's keys and values, and receive the pieces that it needs.

    Args:
        key, value: (B, heads, S / cp, W), before the heads are repeated for the query heads.

    Returns:
        The numbers of the pieces, and their keys and values, (B, heads, tokens of the pieces, W).
    """
    packed = torch.cat([key, value], -1).transpose(1, 2)
    needed = [_list_pieces(calls, context.piece) for calls in by_rank]
    if _needs_all_keys(needed, context):
        pieces: Sequence[int] = range(_num_pieces(context))
        received = gather_slices(packed, context)
    else:
        pieces = needed[context.rank]
        received = _FetchPieces.apply(packed, context, needed)
    widths = [key.shape[-1], value.shape[-1]]
    keys, values = received.transpose(1, 2).split(widths, -1)
    return pieces, keys, values


def _needs_all_keys(needed: Sequence[Sequence[int]], context: Slice) -> bool:
    """Return True if at least one rank needs the keys of all tokens."""
    return any(len(pieces) == _num_pieces(context) for pieces in needed)


def _num_pieces(context: Slice) -> int:
    """Return the number of pieces that contain at least one token besides padding."""
    return -(-context.length // context.piece)


def _list_pieces(calls: Sequence[Call], piece: int) -> list[int]:
    """List the numbers of the pieces with keys of these calls, in ascending order."""
    return sorted({n for call in calls for n in range(call.first // piece, -(-call.last // piece))})


class _FetchPieces(torch.autograd.Function):
    """Send each piece of keys and values, (B, S / cp, heads, W), to the ranks that need it.

    `needed[r]` has the numbers of the pieces that rank r needs, in ascending order. The result has
    the pieces that this rank needs, in the same order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Slice, needed: list[list[int]]) -> Tensor:
        # All layers of one kind need the same pieces. Copying an index to a GPU makes the host wait
        # for all earlier kernels, so the index is made once per forward.
        key = "pieces", x.device, tuple(map(tuple, needed))
        known = context.computed
        if key not in known:
            known[key] = _PieceExchange(context, needed, x.device)
        exchange = ctx.exchange = known[key]
        ctx.context = context
        pieces = x.unflatten(1, (-1, context.piece)).movedim(1, 0)
        received = exchange.send(pieces[exchange.sent], context.group)
        return received[exchange.ascending].movedim(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: _PieceExchange = ctx.exchange
        context: Slice = ctx.context
        piece, own = context.piece, len(context.pieces)
        grads = grad.unflatten(1, (-1, piece)).movedim(1, 0)
        sent_grads = exchange.send_back(grads[exchange.ascending.argsort()], context.group)
        total = sent_grads.new_zeros(own, *sent_grads.shape[1:])
        total.index_add_(0, exchange.sent, sent_grads)
        return total.movedim(0, 1).flatten(1, 2), None, None


class _PieceExchange:
    """The all-to-all of `_FetchPieces`: the pieces that this rank sends to each rank.

    For example, rank 0 has the pieces 0 and 3, and needs both itself. Rank 1 needs only piece 3.
    Then `sent` of rank 0 is [0, 1, 1], and its `send_counts` are [2, 1].

    Args:
        needed: the numbers of the pieces that each rank needs, in ascending order.
        device: the device of `sent` and `ascending`, which must be the device of the tensors.

    Attributes:
        sent: the indices of the pieces to send, in the order of the receiving ranks. An index
            counts the pieces of this rank.
        ascending: the indices that sort the received pieces by their numbers. The pieces are
            received in the order of the sending ranks.
        send_counts, recv_counts: the numbers of pieces for each rank and from each rank.
    """

    def __init__(self, context: Slice, needed: list[list[int]], device: torch.device) -> None:
        own, wanted = list(context.pieces), needed[context.rank]
        by_rank = [[own.index(n) for n in pieces if n in own] for pieces in needed]
        number = len(own)
        owners = [context.order[r * number : (r + 1) * number] for r in range(context.size)]
        from_rank = [[n for n in wanted if n in pieces] for pieces in owners]
        received = [n for pieces in from_rank for n in pieces]
        sent = [index for indices in by_rank for index in indices]
        ascending = [received.index(n) for n in wanted]
        self.sent = torch.tensor(sent, dtype=torch.int64, device=device)
        self.ascending = torch.tensor(ascending, dtype=torch.int64, device=device)
        self.send_counts, self.recv_counts = [*map(len, by_rank)], [*map(len, from_rank)]

    def send(self, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _exchange(pieces, self.send_counts, self.recv_counts, group)

    def send_back(self, pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _exchange(pieces, self.recv_counts, self.send_counts, group)


def _exchange(
    pieces: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = pieces.new_empty(sum(receive), *pieces.shape[1:])
    transfer = start_all_to_all(
        received.flatten(1),
        pieces.flatten(1),
        send_counts=send,
        recv_counts=receive,
        group=group,
        where="keys and values of context parallelism",
    )
    transfer.wait()
    return received
