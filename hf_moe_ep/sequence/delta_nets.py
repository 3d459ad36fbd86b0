"""Split delta nets by heads: each rank runs the recurrence of some heads over the whole sequence.

The forward of a delta net is the stock code, but two functions that it calls are replaced:

    projections, gates            for the tokens of this rank            (stock)
    causal convolution            for the tokens of this rank, behind the last tokens of the
                                  previous rank (the halo)               (`convolve_slice`)
    recurrence                    for all tokens, some of the heads      (`run_heads`)
    norm, output projection       for the tokens of this rank            (stock)

With 2 ranks, 4 heads of values, and 8 tokens, the recurrence of rank 1 computes heads 2 and 3 of
the tokens 0-7. If there are fewer heads of keys than ranks, these heads are repeated, as in
attention. If sp_size does not divide the heads of the values, the recurrence runs on whole
sequences of all heads. Everything else is divided by sp_size in any case.

For each token of its slice, a rank sends (sp - 1) / sp of the queries, keys, values, gates and
outputs of all heads, and the same number of gradients in backward. The halo is an all-gather of the
last K - 1 tokens of each slice, for a kernel of K tokens.

Stock code finds the functions in the globals of its file: kernels of flash-linear-attention and
causal-conv1d if they are installed, otherwise PyTorch. The replacements call the stock function
with all its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.gather import GatherArguments, Split
from hf_moe_ep.sequence.slices import Slice, gather_slices
from hf_moe_ep.sequence.ulysses import exchange_all_for_heads, exchange_for_tokens
from hf_moe_ep.upstream.delta_nets import CONVOLUTION, GATES, RECURRENCES, forward_with


def run_delta_net(
    module: nn.Module, gather: GatherArguments, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a delta net, split by heads if its hook `gather` has chosen so. Replaces its forward."""
    part = gather.layer.part
    if part is None or gather.now != Split.HEADS:
        return stock(*args, **kwargs)
    replaced: dict[str, Callable[..., Any]] = {CONVOLUTION: partial(convolve_slice, part)}
    replaced |= dict.fromkeys(RECURRENCES, partial(run_heads, part))
    return forward_with(module, replaced)(module, *args, **kwargs)


def convolve_slice(
    part: Slice, stock: Callable[..., Tensor], x_BCS: Tensor, weight: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """Call the causal convolution for a slice (B, C, S / sp), with the halo in front of it.

    The first rank has zeros in front, which is what the convolution itself would add.
    """
    width = weight.shape[-1] - 1
    ends = Slice(part.group, part.rank, part.size, length=part.size * width)
    all_ends_BSC = gather_slices(x_BCS[:, :, -width:].transpose(1, 2), ends)
    before_BCS = all_ends_BSC.unflatten(1, (part.size, width))[:, part.rank - 1].transpose(1, 2)
    # Zeros of the first rank depend on the all-gather, because its backward needs every rank.
    is_first = x_BCS.new_full((), part.rank == 0, dtype=torch.bool)
    halo = before_BCS.masked_fill(is_first, 0)
    out = stock(torch.cat([halo, x_BCS], dim=2), weight, *args, **kw)
    return out[:, :, width:]


def run_heads(
    part: Slice,
    stock: Callable[..., tuple[Tensor, Any]],
    query_BSQW: Tensor,
    key_BSQW: Tensor,
    value_BSQW: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Call the recurrence for the heads of this rank, over the whole sequence.

    The gates among the keyword arguments are (B, S / sp, Q) or (B, S / sp, Q, W).
    """
    named = {name: kwargs[name] for name in GATES}
    tensors = [query_BSQW, key_BSQW, value_BSQW, *named.values()]
    splits = value_BSQW.shape[2] % part.size == 0 and all(
        x.shape[2] % part.size == 0 or part.size % x.shape[2] == 0 for x in tensors
    )
    whole = _exchange(tensors, part) if splits else [gather_slices(x, part) for x in tensors]
    query, key, value, *others = whole
    out_BSQW, state = stock(query, key, value, **kwargs | dict(zip(named, others, strict=True)))
    out = exchange_for_tokens(out_BSQW, part) if splits else part.take(out_BSQW, 1)
    return out, state


def _exchange(tensors: list[Tensor], part: Slice) -> list[Tensor]:
    """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

    Tensors of one dtype are sent together.
    """
    heads = [x.transpose(1, 2) if x.ndim == 4 else x.transpose(1, 2).unsqueeze(3) for x in tensors]
    heads = [_repeat_heads(x, part.size) for x in heads]
    received: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in heads):
        positions = [i for i, x in enumerate(heads) if x.dtype == dtype]
        exchanged = exchange_all_for_heads([heads[i] for i in positions], part)
        received |= dict(zip(positions, exchanged, strict=True))
    whole = [received[i].transpose(1, 2).contiguous() for i in range(len(tensors))]
    return [x if like.ndim == 4 else x[..., 0] for x, like in zip(whole, tensors, strict=True)]


def _repeat_heads(x_BQSW: Tensor, size: int) -> Tensor:
    """Repeat the heads if there are fewer heads than ranks."""
    heads = x_BQSW.shape[1]
    return x_BQSW.repeat_interleave(size // heads, 1) if heads < size else x_BQSW
