"""Ulysses sequence parallelism: a sequence split over the sp group, attention split over its heads.

Every rank of an sp group is given the same batch. The model's own code makes masks, positions and
embeddings for the whole sequence; behind that each rank keeps one slice of it. 2 ranks, 4 heads,
8 tokens:

    rank 0   tokens 0-3  |  heads 0 1 of tokens 0-7  |  tokens 0-3
    rank 1   tokens 4-7  |  heads 2 3 of tokens 0-7  |  tokens 4-7
             projections    attention, stock code       projection, experts, head, loss

Two all-to-alls a layer carry queries, keys and values there and results back. A length that sp does
not divide is padded at its end for the slices; attention never sees the padding. Where sp exceeds
the number of key and value heads, these are repeated until every rank has one.

How one forward is split (`Slice`) travels with it, as a keyword argument from the causal LM down to
attention and loss, so that a recompute in backward finds what its own forward had.
(DeepSpeed-Ulysses, arXiv 2309.14509.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.ranks.collectives import gather_counts
from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices, own_heads, own_tokens, sum_slices
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.attention_interface import stock_attention
from hf_moe_ep.upstream.models import IGNORED_LABEL, bind_forward, is_fused_head


class SplitSequence:
    """Pre-forward hook of the causal LM: decides whether this forward is split.

    It is in training and with labels; without both, where `use_cache=False` asks for no cache and
    `logits_to_keep` for no single positions, as `generate` does.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.state.meshes
        if meshes is None or meshes.sp_size == 1:
            return None
        given = bind_forward(model, args, kwargs)
        keep = given.get("logits_to_keep", 0)
        picks = isinstance(keep, Tensor) or bool(keep)
        learns = model.training or given.get("labels") is not None
        split = learns or (given.get("use_cache") is False and not picks)
        if given.get("past_key_values") is not None or not split:
            return None
        if picks:
            raise ValueError(
                f"logits_to_keep={keep} picks positions of a sequence that sp_size="
                f"{meshes.sp_size} splits in training and with labels; leave it out"
            )
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        tokens: Tensor = given[name]
        group = meshes.sp.get_group()
        _check_same_batch(given, tokens, group)
        rank = meshes.sp.get_local_rank()
        part = Slice(group, rank, meshes.sp_size, length=tokens.shape[1])
        given[SLICE] = part
        if is_fused_head(given):
            given["shift_labels"] = _next_labels(
                given.pop("labels", None), given.get("shift_labels"), part
            )
        given["use_cache"] = False
        given["attention_mask"] = _mask_beside(
            given.get("position_ids"), given.get("attention_mask")
        )
        return (), given


class JoinLogits:
    """Forward hook of the causal LM: whole outputs, or none where a loss was asked for."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        part: Slice | None = kwargs.get(SLICE)
        if part is None:
            return None
        if is_fused_head(kwargs):
            return _join_fused(output, part)
        if isinstance(output, tuple):
            raise ValueError("return_dict=False does not go with sp_size > 1; leave it out")
        whole = kwargs.get("labels") is None
        whole |= self.state.config.gather_logits or self.state.gather_logits
        # None, because a wrong accuracy from a slice would be worse than a crash.
        return replace(
            output,
            **{
                name: _join(output.get(name), part) if whole else None
                for name in ("logits", "hidden_states", "attentions", "router_logits")
                if name in output
            },
        )


def _join(x: Any, part: Slice) -> Any:
    """Whole (B, S, V) of slices, whole (B * S, V) of flat slices, or tuples of either."""
    if not isinstance(x, Tensor):
        return None if x is None else tuple(_join(one, part) for one in x)
    flat = x.ndim == 2
    slices = x.unflatten(0, (-1, part.local)) if flat else x
    whole = gather_slices(slices, part)
    return whole.flatten(0, 1).clone() if flat else whole


class TakeSlice:
    """Pre-forward hook of a decoder layer: what is for the whole sequence becomes the slice."""

    def __init__(self, *, first: bool) -> None:
        self.first = first

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        if part is None:
            return None
        if self.first:
            args = (part.take(args[0], 1), *args[1:])
        mine = part.take_shared(kwargs["position_embeddings"])
        return args, {**kwargs, "position_embeddings": mine}


def split_attention(
    stock: Callable[..., Any],
    module: Any,
    query: Tensor,  # (B, heads, S / sp, D)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over the whole sequence for this rank's heads; registered with transformers."""
    part: Slice | None = kwargs.pop(SLICE, None)
    module = stock_attention(module)
    if part is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    kv_heads = key.shape[1]
    if kv_heads < part.size:
        key, value = (x.repeat_interleave(part.size // kv_heads, 1) for x in (key, value))
    query, key, value = own_heads(query, key, value, part)
    # Stock code reads from the module how often to repeat each key.
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    out_BSHD, _ = stock(module, query, key, value, attention_mask, **kwargs)
    return own_tokens(out_BSHD, part), None


def split_loss(
    stock: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """The loss of the whole sequence from this rank's logits, the same on all ranks of the group.

    Its gradient is that of the group's loss times sp: as for any rank of data parallelism, the
    mean over all ranks is what counts.
    """
    part: Slice | None = kw.pop(SLICE, None)
    if part is None:
        return stock(logits, labels, *args, **kw)
    shifted, count = kw.pop("shift_labels", None), kw.pop("num_items_in_batch", None)
    if count is None:
        counted = labels[:, 1:] if shifted is None else shifted
        count = (counted != IGNORED_LABEL).sum()
    mine = _next_labels(labels, shifted, part)
    loss = stock(logits, None, *args, shift_labels=mine, num_items_in_batch=count, **kw)
    return sum_slices(loss, part)


def _next_labels(labels: Tensor | None, shifted: Tensor | None, part: Slice) -> Tensor:
    """What each token of this rank's slice is to predict; -100 behind the end."""
    if shifted is None:
        assert labels is not None
        shifted = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
    return part.take(shifted, 1, fill=IGNORED_LABEL).contiguous()


def _join_fused(output: Any, part: Slice) -> Any:
    """What TRL's head tells of each token, whole on every rank; its own loss, of a slice, is gone.

    One entry per token, the last of which has no label, where TRL without sp has one less.
    """
    whole = {
        name: _gather_numbers(x, part)
        for name, x in output.items()
        if isinstance(x, Tensor) and x.ndim == 2
    }
    return replace(output, **whole, loss=None)


def _gather_numbers(x: Tensor, part: Slice) -> Tensor:
    """(B, S / sp) of every rank to (B, S) on all."""
    numbers = x.to(torch.uint8) if x.dtype == torch.bool else x
    # A copy, because FSDP2 warns of an output that is a view.
    return gather_slices(numbers.unsqueeze(-1), part).squeeze(-1).to(x.dtype, copy=True)


def check_heads(heads: int, kv_heads: int, sp_size: int) -> None:
    """Raise where the heads cannot be split, with both numbers and the sizes that work."""
    sizes = [n for n in range(1, heads + 1) if _splits(heads, kv_heads, n)]
    if sp_size not in sizes:
        raise ValueError(
            f"sp_size ({sp_size}) must divide the attention heads ({heads}), and divide or be "
            f"divided by the key-value heads ({kv_heads}); try {', '.join(map(str, sizes))}"
        )


def attention_with(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`split_attention` around a stock attention function."""
    return partial(split_attention, stock)


def _splits(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _mask_beside(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The mask to pass on: none of all ones, with which stock code does not look at positions.

    Documents packed into one row are told apart by positions that start again; beside a mask they
    would silently see each other (transformers, masking_utils.py, _preprocess_mask_arguments).
    """
    if positions is None or mask is None or mask.ndim != 2:
        return mask
    if positions.ndim == 3:
        if positions.shape[0] != 4:  # of pictures only (temporal, height, width): none of the text
            return mask
        positions = positions[0]
    both = (mask[:, 1:] * mask[:, :-1]).bool()
    restarts, whole = torch.stack([(both & (positions.diff() <= 0)).any(), mask.all()]).tolist()
    if restarts and not whole:
        raise ValueError(
            "position_ids start again within a row, which means packed documents, but the "
            "attention_mask has zeros, with which stock code takes a row for one document; leave "
            "the mask out and fill up rows with a document whose labels are -100"
        )
    return None if restarts else mask


def _check_same_batch(given: dict[str, Any], tokens: Tensor, group: dist.ProcessGroup) -> None:
    """Raise on every rank of the group where they were not given the same batch."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    names = zlib.crc32(
        "".join(f"{name}{tuple(tensors[name].shape)}" for name in sorted(tensors)).encode()
    )
    sums = sum(_checksum(tensors[name]) * place for place, name in enumerate(sorted(tensors), 1))
    assert isinstance(sums, Tensor)
    mine = torch.tensor([*tokens.shape[:2], names], device=tokens.device)
    told = gather_counts(torch.cat([mine, sums.view(1)]), group, where="the sp group's batches")
    if any(row != told[0] for row in told):
        ranks = dist.get_process_group_ranks(group)
        sizes = ", ".join(
            f"rank {rank}: {row[0]} x {row[1]}" for rank, row in zip(ranks, told, strict=True)
        )
        raise ValueError(
            f"ranks of one sp group were given different batches ({sizes}; or other contents): the "
            f"ranks {ranks} split one batch between them. In your own loop draw samples by "
            f"hf_moe_ep.data_parallel_rank(model) of hf_moe_ep.data_parallel_size(model); what is "
            f"random in a data set or collate function needs one seed for all of these ranks"
        )


def _checksum(x: Tensor) -> Tensor:
    """An int64 that differs between other batches; floats in another order may pass."""
    if x.is_floating_point():
        return x.detach().sum(dtype=torch.float64).view(torch.int64)
    places = torch.arange(1, x.numel() + 1, device=x.device)
    return (x.flatten() * places).sum()
