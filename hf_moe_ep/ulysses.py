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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_moe_ep import hf
from hf_moe_ep.comm import all_gather, gather_counts, swap_slices
from hf_moe_ep.grads import IGNORED_LABEL
from hf_moe_ep.state import ModelState

# The keyword argument that carries a Slice.
SLICE = "hf_moe_ep_slice"


@dataclass(frozen=True)
class Slice:
    """How the `length` tokens of each row are split over `group`, `unit` of them never apart."""

    group: dist.ProcessGroup
    rank: int
    size: int
    length: int
    unit: int = 1
    # Slices that all layers share: of which tuple, by its identity, and the slices.
    _shared: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)

    @property
    def local(self) -> int:
        """Tokens of each row on one rank, padding included."""
        return -(-self.length // (self.size * self.unit)) * self.unit

    def take(self, x: Tensor, dim: int, *, fill: float = 0) -> Tensor:
        """This rank's slice of a whole tensor; `fill` stands for the padding."""
        start = min(self.rank * self.local, self.length)
        part = x.narrow(dim, start, min(self.local, self.length - start))
        missing = self.local - part.shape[dim]
        if not missing:
            return part.clone()  # a view would keep the whole alive
        shape = [*part.shape[:dim], missing, *part.shape[dim + 1 :]]
        return torch.cat([part, part.new_full(shape, fill)], dim)

    def take_shared(self, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Slices along dim 1, made once; `whole` lives as long as a layer can ask for it again."""
        if id(whole) not in self._shared:
            self._shared[id(whole)] = tuple(self.take(x, 1) for x in whole)
        return self._shared[id(whole)]


class SplitSequence:
    """Pre-forward hook of the causal LM: decides whether this forward is split.

    It is where no key-value cache is asked for: in training, with labels, or by `use_cache=False`.
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
        given = hf.bind_forward(model, args, kwargs)
        uncached = model.training or given.get("labels") is not None
        uncached |= given.get("use_cache") is False
        if given.get("past_key_values") is not None or not uncached:
            return None
        keep = given.get("logits_to_keep", 0)
        if isinstance(keep, Tensor) or keep:
            raise ValueError(
                f"logits_to_keep={keep} picks positions of a sequence that sp_size="
                f"{meshes.sp_size} splits; leave it out, or pass use_cache=True"
            )
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        tokens: Tensor = given[name]
        group = meshes.sp.get_group()
        _check_same_batch(given, tokens, group)
        rank = meshes.sp.get_local_rank()
        part = Slice(group, rank, meshes.sp_size, length=tokens.shape[1])
        given[SLICE] = part
        if hf.is_fused_head(given):
            given["shift_labels"] = _next_labels(given.pop("labels"), part)
        given["use_cache"] = False
        given["attention_mask"] = _mask_beside(
            given.get("position_ids"), given.get("attention_mask")
        )
        return (), given


class JoinLogits:
    """Forward hook of the causal LM: whole logits, or none where a loss was asked for."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        part: Slice | None = kwargs.get(SLICE)
        if part is None:
            return None
        if hf.is_fused_head(kwargs):
            return _join_fused(output, part)
        if isinstance(output, tuple):
            raise ValueError("return_dict=False does not go with sp_size > 1; leave it out")
        gather = self.state.config.gather_logits or self.state.gather_logits
        if kwargs.get("labels") is None or gather:
            return replace(output, logits=gather_slices(output.logits, part))
        # A wrong accuracy from a slice would be worse than a crash.
        return replace(output, logits=None)


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
    module = hf.stock_attention(module)
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


def own_heads(query: Tensor, key: Tensor, value: Tensor, part: Slice) -> tuple[Tensor, ...]:
    """(B, heads, S / sp, D) each, to this rank's heads of all tokens: (B, heads / sp, S, D)."""
    # One message: each rank's heads of all three, one rank after the other.
    packed = torch.cat([x.unflatten(1, (part.size, -1)) for x in (query, key, value)], dim=2)
    whole = _HeadsToSequence.apply(packed, part)[:, :, : part.length]
    return whole.split([x.shape[1] // part.size for x in (query, key, value)], dim=1)


def own_tokens(out_BSHD: Tensor, part: Slice) -> Tensor:
    """The way back: (B, S, heads / sp, D) to (B, S / sp, heads, D)."""
    out: Tensor = _SequenceToHeads.apply(out_BSHD, part)
    return out


def gather_slices(x: Tensor, part: Slice) -> Tensor:
    """(B, S / sp, V) of every rank to (B, S, V) on all; the gradients of all ranks are added."""
    whole: Tensor = _Gather.apply(x, part)
    return whole


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
    count = kw.pop("num_items_in_batch", None)
    if count is None:
        count = (labels[:, 1:] != IGNORED_LABEL).sum()
    mine = _next_labels(labels, part)
    loss = stock(logits, None, *args, shift_labels=mine, num_items_in_batch=count, **kw)
    total: Tensor = _Sum.apply(loss, part)
    return total


def _next_labels(labels: Tensor, part: Slice) -> Tensor:
    """What each token of this rank's slice is to predict; -100 behind the end."""
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
            f"ranks {ranks} split one batch between them. Draw samples by "
            f"hf_moe_ep.data_parallel_rank(model) of hf_moe_ep.data_parallel_size(model)"
        )


def _checksum(x: Tensor) -> Tensor:
    """An int64 that differs where `x` does, as good as always."""
    if x.is_floating_point():
        return x.detach().sum(dtype=torch.float64).view(torch.int64)
    places = torch.arange(1, x.numel() + 1, device=x.device)
    return (x.flatten() * places).sum()


class _HeadsToSequence(torch.autograd.Function):
    """(B, sp, heads, S / sp, D), by owner of the heads, to (B, heads, S, D)."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        arrived = swap_slices(packed.movedim(1, 0), part.group)
        return arrived.movedim(0, 2).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_owner = grad.unflatten(2, (ctx.part.size, -1)).movedim(2, 0)
        return swap_slices(by_owner, ctx.part.group).movedim(0, 1), None


class _SequenceToHeads(torch.autograd.Function):
    """(B, S without padding, heads / sp, D) to (B, S / sp, heads, D)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        padded = functional.pad(out, (0, 0, 0, 0, 0, part.local * part.size - part.length))
        arrived = swap_slices(padded.unflatten(1, (part.size, -1)).movedim(1, 0), part.group)
        return arrived.movedim(0, 2).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        by_owner = grad.unflatten(2, (part.size, -1)).movedim(2, 0)
        arrived = swap_slices(by_owner, part.group).movedim(0, 1).flatten(1, 2)
        return arrived[:, : part.length], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        return all_gather(x, part.group).movedim(0, 1).flatten(1, 2)[:, : part.length]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        padded = functional.pad(grad, (0, 0, 0, part.local * part.size - part.length))
        by_owner = padded.unflatten(1, (part.size, -1)).movedim(1, 0)
        return swap_slices(by_owner, part.group).sum(0), None


class _Sum(torch.autograd.Function):
    """The sum over the group, whose backward is a sum as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        return _sum(x, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, ctx.part), None


def _sum(x: Tensor, part: Slice) -> Tensor:
    """Of a scalar, with the additions of every rank in one order."""
    return all_gather(x, part.group).sum()
