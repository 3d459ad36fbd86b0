"""Ulysses sequence parallelism: split the sequence over ranks, and attention over its heads.

Every rank of an sp group gets the same batch. Stock code computes masks, positions and embeddings
of the whole sequence; then each rank keeps a slice. With 2 ranks, 4 heads and 8 tokens:

    rank 0   tokens 0-3  |  heads 0 1 of tokens 0-7  |  tokens 0-3
    rank 1   tokens 4-7  |  heads 2 3 of tokens 0-7  |  tokens 4-7
             projections    attention, stock code       projection, experts, head, loss

Each layer has two all-to-alls: one for queries, keys and values, and one for the results. With
context parallelism (cp) the ranks of an sp group exchange only the tokens of their cp rank, and
`context.py` computes their attention to the tokens of the other cp ranks. If sp does not divide the
length, the last slices are padded; attention does not see the padding. If there are fewer key and
value heads than ranks, these heads are repeated until there is one per rank.

    exchange_for_heads     (B, Q, S / sp, W)   to   (B, Q / sp, S, W)      Q heads of width W
    exchange_for_tokens    (B, S, Q / sp, W)   to   (B, S / sp, Q, W)

Both functions are differentiable, and the backward of each function makes the exchange of the
other. W may differ between tensors, because values may be narrower than queries. Attention sinks
(one number per head) are sliced to the heads of the rank. Source: DeepSpeed-Ulysses, arXiv
2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from hf_moe_ep.ranks.collectives import swap_slices
from hf_moe_ep.sequence.block_masks import build_block_mask
from hf_moe_ep.sequence.context import attend
from hf_moe_ep.sequence.latent_cache import restore_order
from hf_moe_ep.sequence.partial_attention import compute_once
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.upstream.attention_interface import copy_with_stock_config


# torch.compile cannot trace the exchanges.
@torch.compiler.disable
def split_attention(
    stock: Callable[..., Any],
    module: Any,
    query: Tensor,  # (B, Q, S / sp, W)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of the whole sequence for the heads of this rank.

    This function is registered with transformers' attention interface.
    """
    part: Slice | None = kwargs.pop(SLICE, None)
    module = copy_with_stock_config(module)
    if part is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    heads, kv_heads = part.sp_slice, key.shape[1]
    check_heads({(query.shape[1], kv_heads)}, heads.size)
    _slice_sinks(module, kwargs, heads)
    attention_mask = _slice_mask(attention_mask, heads, part.computed)
    if part.positions is not None and "position_ids" in kwargs:
        kwargs["position_ids"] = part.positions
    if kv_heads < heads.size:
        key, value = (x.repeat_interleave(heads.size // kv_heads, 1) for x in (key, value))
    is_gathered, part.keys_are_gathered = part.keys_are_gathered, False
    if heads.size > 1 and is_gathered:
        query, key, value = _HeadsToSequence.apply(heads, query, key, value)
        key, value = restore_order(key, part), restore_order(value, part)
    elif heads.size > 1:
        query, key, value = exchange_for_heads([query, key, value], heads)
    # Stock code reads from this attribute how often it must repeat each key and value head.
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    if part.cp_slice is None:
        out_BSQW, _ = stock(module, query, key, value, attention_mask, **kwargs)
    else:
        qkv = query, key, value
        gather = not is_gathered
        out_BSQW = attend(stock, module, *qkv, attention_mask, part.cp_slice, gather, **kwargs)
    return (exchange_for_tokens(out_BSQW, heads) if heads.size > 1 else out_BSQW), None


def exchange_for_heads(tensors: Sequence[Tensor], part: Slice) -> tuple[Tensor, ...]:
    """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

    The tensors are (B, Q, S / sp, W), the results (B, Q / sp, S, W). All tensors have one dtype and
    are exchanged in one all-to-all. sp_size must divide the number of heads Q of each tensor.
    """
    exchanged: tuple[Tensor, ...] = _HeadsToSequence.apply(part, *tensors)
    return tuple(part.join(x, 2) for x in exchanged)


def exchange_for_tokens(out_BSQW: Tensor, part: Slice) -> Tensor:
    """Exchange this rank's heads of all tokens for all heads of this rank's tokens.

    The argument is (B, S, Q / sp, W), the result (B, S / sp, Q, W).
    """
    return _SequenceToHeads.apply(out_BSQW, part)


def check_heads(heads: set[tuple[int, int]], sp_size: int) -> None:
    """Raise ValueError if the heads cannot be split; the error lists the sizes that work.

    Args:
        heads: the pairs (heads, key-value heads) of all layers.
    """
    fewest = min(queries for queries, _ in heads)
    sizes = [
        size
        for size in range(1, fewest + 1)
        if all(_can_split(queries, keys, size) for queries, keys in heads)
    ]
    for queries, keys in sorted(heads):
        if not _can_split(queries, keys, sp_size):
            raise ValueError(
                f"sp_size ({sp_size}) must divide the attention heads ({queries}), and divide or "
                f"be divided by the key-value heads ({keys}); try {', '.join(map(str, sizes))}"
            )


def wrap_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return `split_attention` with a stock attention function as its first argument."""
    return partial(split_attention, stock)


def _slice_sinks(module: Any, kwargs: dict[str, Any], part: Slice) -> None:
    """Slice the attention sinks to the heads of this rank (one sink per head).

    Flash attention takes the sinks as an argument. Eager attention reads them from the module
    (models/gpt_oss/modeling_gpt_oss.py). `module` is a copy, so this function may change it.
    """
    sinks = kwargs.get("s_aux")
    if sinks is None:
        return
    own_sinks = sinks.unflatten(0, (part.size, -1))[part.rank]
    kwargs["s_aux"] = own_sinks
    parameters = module._parameters
    module._parameters = {name: own_sinks if x is sinks else x for name, x in parameters.items()}


def _slice_mask(mask: Any, part: Slice, computed: dict[Any, Any]) -> Any:
    """Slice a mask (B, Q, S, S) with one entry per head to the heads of this rank.

    Masks that transformers builds are the same for all heads. A mask of the caller may differ from
    head to head.
    """
    if part.size == 1 or not isinstance(mask, Tensor | BlockMask):
        return mask
    if len(mask.shape) != 4 or mask.shape[1] == 1:
        return mask
    if isinstance(mask, BlockMask):
        return compute_once(computed, ("heads",), mask, partial(_slice_block_mask, mask, part))
    return mask.unflatten(1, (part.size, -1))[:, part.rank]


def _slice_block_mask(mask: BlockMask, part: Slice) -> BlockMask:
    rows, heads = mask.shape[0], mask.shape[1] // part.size
    first = part.rank * heads

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.mask_mod(row, head + first, query, key)

    shape = rows, heads, *mask.seq_lengths
    return build_block_mask(mask_mod, shape, mask.kv_num_blocks.device, mask.BLOCK_SIZE)


def _can_split(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


class _HeadsToSequence(torch.autograd.Function):
    """Exchange tensors (B, Q, S / sp, W) for tensors (B, Q / sp, S, W), padding included."""

    @staticmethod
    def forward(ctx: Any, part: Slice, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        by_owner = [x.unflatten(1, (part.size, -1)).movedim(1, 0) for x in tensors]
        return tuple(x.movedim(0, 2).flatten(2, 3) for x in _swap_together(by_owner, part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        by_owner = [grad.unflatten(2, (part.size, -1)).movedim(2, 0) for grad in grads]
        return None, *(x.movedim(0, 1).flatten(1, 2) for x in _swap_together(by_owner, part))


def _swap_together(tensors: Sequence[Tensor], part: Slice) -> list[Tensor]:
    """Exchange several tensors in one all-to-all. In each tensor `tensor[r]` is sent to rank r."""
    sizes = [x[0].numel() for x in tensors]
    packed = tensors[0].new_empty(part.size, sum(sizes))
    for x, target in zip(tensors, packed.split(sizes, 1), strict=True):
        target.view(x.shape).copy_(x)
    received = swap_slices(packed, part.group).split(sizes, 1)
    return [x.view(like.shape) for x, like in zip(received, tensors, strict=True)]


class _SequenceToHeads(torch.autograd.Function):
    """Exchange a tensor (B, S, Q / sp, W) for (B, S / sp, Q, W). S is without padding."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        by_owner = part.arrange_by_rank(out).unflatten(1, (part.size, -1)).movedim(1, 0)
        received = swap_slices(by_owner, part.group)
        # Stock code calls view on the result, which needs contiguous memory. With one head per rank
        # flatten returns a strided view.
        return received.movedim(0, 2).flatten(2, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        by_owner = grad.unflatten(2, (part.size, -1)).movedim(2, 0)
        received = swap_slices(by_owner, part.group).movedim(0, 1).flatten(1, 2)
        return part.join(received, 1), None
