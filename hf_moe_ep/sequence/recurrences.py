"""Split recurrences by heads: each rank runs the recurrence of some heads over the whole sequence.

The forward of a delta net or a state space model is stock code, but two functions that it calls are
replaced:

    stage                      computes                                   replaced by
    projections, gates         the tokens of this rank                    -
    causal convolution         the last tokens of the previous piece      `convolve_slice`
                               (halo) and the tokens of this rank
    recurrence                 all tokens, for some of the heads          `run_recurrence`
    norm, output projection    the tokens of this rank                    -

With 2 ranks, 4 value heads, and 8 tokens, the recurrence of rank 1 computes heads 2 and 3 of the
tokens 0-7. If there are fewer key heads (in Mamba-2: fewer groups) than ranks, these heads are
repeated, as in attention. A channel of Mamba-1 counts as a head. If sp_size does not divide the
number of heads, each rank scans its own tokens, and states are passed on (states.py). Mamba-1,
whose function takes no state, then runs on whole sequences of all heads. All other computation is
divided by sp_size in every case. With context parallelism, the heads are split over the cp x sp
ranks of a batch. A module with a convolution and no recurrence, such as the short convolutions of
LFM2, needs only the halo. If its forward calls a function that we do not know, which may be a
recurrence, the module gets whole sequences (`mixes_by_convolution_alone`).

For each token of its slice, a rank sends (sp - 1) / sp of these values in forward, and as many
gradients in backward:

    delta net    the queries, keys, values and outputs of all heads, and two gates per head
    KDA          the same, but one of the gates has a value per channel of the keys
    Mamba-2      x, dt, B, C and the output
    Mamba-1      x, dt, the gate and the output; B and C are all-gathered, (sp - 1) times their size

The halo is an all-gather of the last K - 1 tokens of each piece, for a kernel of K tokens.
Parameters with one entry per head are sliced. Their gradients need no collective of their own,
because FSDP2 adds the gradients of all ranks.

Stock code finds the functions in the globals of its file: kernels of flash-linear-attention,
causal-conv1d and mamba-ssm if they are installed, otherwise PyTorch. The replacements call the
stock function with all its arguments. The kernel of mamba-ssm that also computes the norm and the
output projection needs all heads, so the forward calls the two separate kernels instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.mixers import GatherArguments, MixerSplit
from hf_moe_ep.sequence.slices import Slice, gather_slices
from hf_moe_ep.sequence.states import passes_states, run_pieces
from hf_moe_ep.sequence.ulysses import exchange_for_heads, exchange_for_tokens
from hf_moe_ep.upstream.recurrences import (
    CONVOLUTION,
    FUSED,
    RECURRENCES,
    Layout,
    Recurrence,
    copy_forward_with,
)


def run_slice(
    module: nn.Module, gather: GatherArguments, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replace a mixer's forward; compute only the slice if the hook `gather` has chosen so."""
    part = gather.layer.part
    if part is None or gather.current_split not in (MixerSplit.HEADS, MixerSplit.HALO):
        return stock(*args, **kwargs)
    replaced: dict[str, Callable[..., Any]] = {CONVOLUTION: partial(convolve_slice, part)}
    if gather.current_split == MixerSplit.HEADS:
        replaced |= {name: partial(run_recurrence, part, r) for name, r in RECURRENCES.items()}
        replaced[FUSED] = lambda *args, **kwargs: None
    return copy_forward_with(module, replaced)(module, *args, **kwargs)


def convolve_slice(
    part: Slice, stock: Callable[..., Tensor], x_BCS: Tensor, weight: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """Call the causal convolution for a slice (B, C, S / sp), with a halo before each piece.

    The first piece gets zeros in front, as the convolution itself would add them.
    """
    width, pieces = weight.shape[-1] - 1, x_BCS.split(part.piece_length, dim=2)
    # The last tokens of all pieces, in the order of the ranks.
    ends = Slice(part.group, part.rank, part.size, length=len(part.order) * width)
    own_ends_BCS = torch.cat([piece[:, :, -width:] for piece in pieces], dim=2)
    all_ends_BSC = gather_slices(own_ends_BCS.transpose(1, 2), ends)
    by_piece = all_ends_BSC.unflatten(1, (len(part.order), width)).transpose(2, 3)
    index_of_piece = {piece: index for index, piece in enumerate(part.order)}
    outs = []
    for number, x in zip(part.piece_numbers, pieces, strict=True):
        # The zeros of piece 0 are computed from the all-gather, whose backward needs every rank.
        is_first = x.new_full((), number == 0, dtype=torch.bool)
        halo_BCS = by_piece[:, index_of_piece[max(number, 1) - 1]].masked_fill(is_first, 0)
        outs.append(stock(torch.cat([halo_BCS, x], dim=2), weight, *args, **kw)[:, :, width:])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def run_recurrence(
    part: Slice, recurrence: Recurrence, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a recurrence for this rank's heads, for its tokens, or for all heads and tokens.

    The arguments have the tokens of this rank, in the layouts that `recurrence` names.
    """
    layouts = recurrence.layouts(args, kwargs)
    given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    tensors = {key: given[key] for key in layouts}
    layout = layouts[recurrence.like_output]
    num_heads = {
        key: _put_heads_first(x, layouts[key]).shape[1]
        for key, x in tensors.items()
        if layouts[key] in (Layout.HEADS, Layout.CHANNELS)
    }
    splits = num_heads[recurrence.like_output] % part.size == 0
    splits &= all(_can_split(heads, part.size) for heads in num_heads.values())
    if not splits and passes_states(recurrence, given):
        return run_pieces(part, recurrence, stock, given, layouts)
    given |= _exchange(tensors, layouts, part) if splits else _gather(tensors, layouts, part)
    out = stock(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
    first, *others = out if isinstance(out, tuple) else (out,)
    first_BSQW = _put_heads_first(first, layout).transpose(1, 2)
    own_BSQW = exchange_for_tokens(first_BSQW, part) if splits else part.take(first_BSQW, 1)
    own = _restore_layout(own_BSQW.transpose(1, 2), first, layout)
    return (own, *others) if isinstance(out, tuple) else own


def _exchange(
    tensors: dict[int | str, Tensor], layouts: dict[int | str, Layout], part: Slice
) -> dict[int | str, Tensor]:
    """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

    Tensors of one dtype are sent together. Parameters are sliced, and states are gathered.
    """
    results: dict[int | str, Tensor] = {}
    by_dtype: dict[torch.dtype, dict[int | str, Tensor]] = {}
    for key, x in tensors.items():
        if layouts[key] == Layout.PER_HEAD:
            results[key] = x.unflatten(0, (part.size, -1))[part.rank]
        elif layouts[key] == Layout.STATES:
            results[key] = _gather_tokens(x, layouts[key], part)
        else:
            heads = _repeat_heads(_put_heads_first(x, layouts[key]), part.size)
            by_dtype.setdefault(x.dtype, {})[key] = heads
    for heads_by_key in by_dtype.values():
        exchanged = exchange_for_heads([*heads_by_key.values()], part)
        for key, x in zip(heads_by_key, exchanged, strict=True):
            results[key] = _restore_layout(x, tensors[key], layouts[key])
    return results


def _gather(
    tensors: dict[int | str, Tensor], layouts: dict[int | str, Layout], part: Slice
) -> dict[int | str, Tensor]:
    """Gather all tokens of all heads. Parameters are whole already."""
    return {
        key: _gather_tokens(x, layouts[key], part)
        for key, x in tensors.items()
        if layouts[key] != Layout.PER_HEAD
    }


def _gather_tokens(x: Tensor, layout: Layout, part: Slice) -> Tensor:
    if layout == Layout.HEADS:
        return gather_slices(x, part)
    return gather_slices(x.transpose(1, 2), part).transpose(1, 2).contiguous()


def _put_heads_first(x: Tensor, layout: Layout) -> Tensor:
    """Return a tensor in the order (B, heads, S, W)."""
    if layout == Layout.CHANNELS:
        return x.unsqueeze(3)
    x_BQSW = x.transpose(1, 2)
    return x_BQSW if x.ndim == 4 else x_BQSW.unsqueeze(3)


def _restore_layout(x_BQSW: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """Undo `_put_heads_first`; the result has as many dimensions as `like`."""
    if layout == Layout.CHANNELS:
        return x_BQSW.squeeze(3).contiguous()
    x_BSQW = x_BQSW.transpose(1, 2).contiguous()
    return x_BSQW if like.ndim == 4 else x_BSQW[..., 0]


def _can_split(heads: int, size: int) -> bool:
    return heads % size == 0 or size % heads == 0


def _repeat_heads(x_BQSW: Tensor, size: int) -> Tensor:
    """Repeat the heads if there are fewer heads than ranks."""
    heads = x_BQSW.shape[1]
    return x_BQSW.repeat_interleave(size // heads, 1) if heads < size else x_BQSW
