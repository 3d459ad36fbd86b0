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

sdpa and flash attention compute each head alone. For them an all-gather of keys and values is
divided into up to four shares of heads. A rank waits for the first share, and computes attention to
one share while the next are sent. In backward, the gradients of a share are sent while those of the
share before it are computed. Nothing hides the transfer of the first share and of its gradients.

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
from hf_moe_ep.sequence.slices import Slice, StartedGather, gather_slices
from hf_moe_ep.upstream.attention_interface import (
    uses_flash_attention,
    uses_flex_attention,
    uses_sdpa,
)
from hf_moe_ep.upstream.autograd_modes import backward_is_running, saved_tensors_are_hooked

# Of N shares of heads, the transfers of N - 1 can be hidden.
_MAX_SHARES = 4


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
    sinks = kwargs.get("s_aux")
    if gather and uses_flex_attention(module) and isinstance(attention_mask, BlockMask):
        if kwargs.get("dropout"):
            raise ValueError(
                f"FlexAttention has no dropout, and attention_dropout is {kwargs['dropout']}; set "
                f"config.attention_dropout = 0, or load the model with attn_implementation='sdpa'"
            )
        needed = [_list_pieces(calls, context.piece_length) for calls in by_rank]
        if _needs_all_keys(needed, context):
            cap, scale, options = map(kwargs.get, ("softcap", "scaling", "kernel_options"))
            scores = ScoreOptions(attention_mask, scale, cap, options)
            return attend_by_ring(query, key, value, scores, sinks, context)
    num_shares = _count_shares(module, attention_mask, key) if gather else 0
    run = partial(_attend_to_gathered, stock, module, by_rank, context, num_shares, sinks)
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
    num_shares: int,
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Get the keys and values of other ranks, and attend to them.

    Args:
        num_shares: the number of shares of heads that are gathered one after the other, while the
            attention to earlier shares is computed; 0 if keys and values have all tokens already.
        sinks: a number per query head for the softmax, or None.
    """
    attend_to = partial(_attend_to_pieces, stock, module, by_rank[context.rank], context)
    everything: Sequence[int] = range(_count_pieces(context))
    if not num_shares:
        return attend_to(everything, sinks, query, key, value)
    needed = [_list_pieces(calls, context.piece_length) for calls in by_rank]
    if not _needs_all_keys(needed, context):
        received = _FetchPieces.apply(_join(key, value), context, needed)
        return attend_to(needed[context.rank], sinks, query, *_separate(received, key, value))
    keys, values = key.tensor_split(num_shares, 1), value.tensor_split(num_shares, 1)
    sizes = [share.shape[1] * (query.shape[1] // key.shape[1]) for share in keys]
    sinks_of = [None] * num_shares if sinks is None else sinks.split(sizes)
    first, *others = [_join(k, v) for k, v in zip(keys, values, strict=True)]
    gathered = gather_slices(first, context)
    gathers = [StartedGather(share, context) for share in others]
    outs = []
    for number, (queries, own_sinks) in enumerate(
        zip(query.split(sizes, 1), sinks_of, strict=True)
    ):
        received = gathers[number - 1].wait() if number else gathered
        outs.append(attend_to(everything, own_sinks, queries, *_separate(received, key, value)))
    return torch.cat(outs, 2) if others else outs[0]


def _attend_to_pieces(
    stock: Callable[..., Any],
    module: Any,
    own_calls: Sequence[Call],
    context: Slice,
    pieces: Sequence[int],
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Run the calls of this rank.

    Args:
        pieces: the numbers of the pieces whose tokens `key` and `value` have.
        sinks: a number for each head of `query`, or None.
    """
    calls = iter(own_calls)
    outs = []
    for (start, stop), queries in zip(
        context.spans, query.split(context.piece_length, 2), strict=True
    ):
        if start < stop:
            call = next(calls)
            # The received keys are whole pieces. The keys of one call follow each other.
            piece, offset = divmod(call.first, context.piece_length)
            first = pieces.index(piece) * context.piece_length + offset
            seen = slice(first, first + call.last - call.first)
            args = queries[:, :, : stop - start], key[:, :, seen], value[:, :, seen]
            outs.append(_run(stock, module, call, sinks, *args))
    # On a rank without tokens, only these empty tensors connect the output with queries, values and
    # sinks, and with keys, which are exchanged together with values. Such a rank needs gradients as
    # well, because all ranks take part in FSDP2's reductions and in this exchange. The squares save
    # tensors for backward, whichever of queries and values need gradients. Without saved tensors
    # torch does not recompute a checkpoint, and this rank would miss the exchange inside it.
    size = (len(query), 0, query.shape[1], value.shape[-1])
    empty = [x.transpose(1, 2).square() for x in (query[:, :, :0, :1], value[:, :1, :0])]
    empty += [] if sinks is None else [sinks.view(1, 1, -1, 1)[:, :0].to(value.dtype)]
    out_BSQW = torch.cat([*outs, *(x.expand(size) for x in empty)], 1)
    return functional.pad(out_BSQW, (0, 0, 0, 0, 0, context.local_length - out_BSQW.shape[1]))


def _run(
    stock: Callable[..., Any],
    module: Any,
    call: Call,
    sinks: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    kwargs = call.kwargs if sinks is None else call.kwargs | {"s_aux": sinks}
    if call.pads_queries:
        before, behind = call.start - call.first, call.last - call.stop
        padded = functional.pad(query, (0, 0, before, behind))
        out: Tensor = stock(module, padded, key, value, call.mask, **kwargs)[0]
        return out[:, before : before + query.shape[2]]
    out = stock(module, query, key, value, call.mask, **kwargs)
    return out[0]


def _join(key: Tensor, value: Tensor) -> Tensor:
    """Join keys and values, (B, heads, S / cp, W) each, in one tensor (B, S / cp, heads, 2W)."""
    return torch.cat([key, value], -1).transpose(1, 2)


def _separate(received: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    """Undo `_join` for received tokens. Only the widths of `key` and `value` are used."""
    return received.transpose(1, 2).split([key.shape[-1], value.shape[-1]], -1)


def _count_shares(module: Any, attention_mask: Any, key: Tensor) -> int:
    """Return the number of shares of heads that are gathered one after the other.

    Only sdpa and flash attention compute each head alone: an eager function may read numbers of all
    heads from its module (the sinks of gpt-oss), and a mask may have rows for each head.
    """
    is_tensor = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
    by_head = is_tensor and attention_mask.shape[1] > 1
    if by_head or not (uses_sdpa(module) or uses_flash_attention(module)):
        return 1
    return min(_MAX_SHARES, key.shape[1])


def _needs_all_keys(needed: Sequence[Sequence[int]], context: Slice) -> bool:
    """Return True if at least one rank needs the keys of all tokens."""
    return any(len(pieces) == _count_pieces(context) for pieces in needed)


def _count_pieces(context: Slice) -> int:
    """Return the number of pieces that contain at least one token besides padding."""
    return -(-context.length // context.piece_length)


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
        pieces = x.unflatten(1, (-1, context.piece_length)).movedim(1, 0)
        received = exchange.send(pieces[exchange.sent], context.group)
        return received[exchange.ascending].movedim(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: _PieceExchange = ctx.exchange
        context: Slice = ctx.context
        piece, own = context.piece_length, len(context.piece_numbers)
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
        own, wanted = list(context.piece_numbers), needed[context.rank]
        by_rank = [[own.index(n) for n in pieces if n in own] for pieces in needed]
        owners = map(context.piece_numbers_of, range(context.size))
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
