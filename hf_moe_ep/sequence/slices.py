"""Slice sequences over the ranks that share a batch, and gather the slices again.

With N ranks and sequences of S tokens, every rank has the same number of tokens of each row of the
batch (`Slice.local_length`): S / N, or more if this number is no integer, because the last tokens
are padding then. Both collectives are differentiable:

    gather_slices   (B, S / N, ...)       to   (B, S, ...) on every rank
    sum_slices      one number per slice  to   their sum on every rank

With sequence parallelism alone, the slices are consecutive. With context parallelism a rank also
computes causal attention only for its own tokens, and the last token of a sequence has S times the
work of the first one. The sequence is therefore cut into 2 x cp chunks, and cp rank i gets the
chunks i and 2 x cp - 1 - i (zigzag order). Its sp ranks divide these tokens. With cp 2 and 16
tokens:

             sp 1                        sp 2
    rank 0   tokens 0-3, tokens 12-15    rank 0   tokens 0-3      rank 2   tokens 4-7
    rank 1   tokens 4-7, tokens 8-11     rank 1   tokens 12-15    rank 3   tokens 8-11

A `Slice` therefore consists of pieces of equal length: two per rank in zigzag order, else one. The
exchanges of attention are in `ulysses.py` (heads) and `context.py` (keys and values).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from hf_moe_ep.ranks.collectives import (
    Transfer,
    all_gather,
    start_all_gather,
    start_swap,
    swap_slices,
)
from hf_moe_ep.upstream.autograd_modes import is_view

# The keyword argument that carries a Slice.
SLICE = "hf_moe_ep_slice"


class Slice:
    """The tokens of one rank, which are some of the `length` tokens of each row.

    This class is not a dataclass, because FSDP2 copies every dataclass among a unit's arguments.

    Args:
        group: the process group of the ranks that share the sequence.
        rank: the index of this rank in the group.
        size: the number of ranks in the group.
        length: the number of tokens in a row.
        unit: the number of tokens in a piece is a multiple of `unit`.
        order: the numbers of the pieces in the order of their ranks; None if rank r has piece r.

    Attributes:
        cp_slice: the tokens of this rank's sp group, as a slice of the cp group; None without
            context parallelism.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        length: int,
        unit: int = 1,
        order: Sequence[int] | None = None,
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.length, self.unit = length, unit
        self.order = range(size) if order is None else order
        self.is_in_order = order is None
        self.cp_slice: Slice | None = None
        self._sp_slice: Slice | None = None
        # True after a cache has gathered latents, until attention uses the keys made from them.
        self.keys_are_gathered = False
        # The position ids of the whole sequence. Flash attention finds packed documents in them.
        self.positions: Tensor | None = None
        # For each row, (first token, last token + 1) of each document; None if the rows are not
        # packed. It is set only if hooks separate the documents (mixers.py, packed_rows.py).
        self.documents: list[list[tuple[int, int]]] | None = None
        # In a forward that torch.compile traces, `documents` is None, because only the device knows
        # the documents. This is the number of each token's document, (B or 1, S).
        self.document_numbers: Tensor | None = None
        # For packed rows: {id of a mask: (mask, mask that separates the documents)}.
        self.separated: dict[int, tuple[Any, Any]] = {}
        # True if masks have only the rows of this rank (sequence/mask_rows.py).
        self.has_mask_rows = False
        # Results that were computed from a mask or from positions, and that layers share.
        self.computed: dict[Any, Any] = {}
        # For tensors that all layers receive: {id of the whole tensor: (reference to it, slice)}.
        # The references are weak, because FSDP2 may cast an argument anew for each layer.
        self._shared: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        # For each device: the positions of all tokens in the order of the ranks, and the inverse of
        # this permutation.
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def sp_slice(self) -> Slice:
        """This rank's slice of the tokens of its cp rank, which its sp group shares.

        Attention exchanges these tokens for heads. Without context parallelism,
        `sp_slice` is `self`.
        """
        return self if self._sp_slice is None else self._sp_slice

    def divide(self, sp_mesh: DeviceMesh, cp_mesh: DeviceMesh) -> None:
        """Set `sp_slice` and `cp_slice`, if cp_size is > 1."""
        sp, cp = sp_mesh.size(), cp_mesh.size()
        if cp == 1:
            return
        order = None if self.is_in_order else make_zigzag_order(cp)
        group, rank = cp_mesh.get_group(), cp_mesh.get_local_rank()
        self.cp_slice = Slice(group, rank, cp, self.length, self.unit * sp, order)
        group, rank = sp_mesh.get_group(), sp_mesh.get_local_rank()
        self._sp_slice = Slice(group, rank, sp, self.cp_slice.local_length)
        assert self._sp_slice.local_length == self.local_length
        assert self.cp_slice.rank * sp + rank == self.rank

    @property
    def piece_length(self) -> int:
        """The number of tokens of each row in one piece, padding included."""
        return -(-self.length // (len(self.order) * self.unit)) * self.unit

    @property
    def local_length(self) -> int:
        """The number of tokens of each row on one rank, padding included."""
        return self.piece_length * len(self.order) // self.size

    @property
    def piece_numbers(self) -> Sequence[int]:
        """The numbers of this rank's pieces, in ascending order."""
        return self.piece_numbers_of(self.rank)

    def piece_numbers_of(self, rank: int) -> Sequence[int]:
        """Return the `piece_numbers` of another rank."""
        number = len(self.order) // self.size
        return self.order[rank * number : (rank + 1) * number]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first token, last token + 1) of each piece of this rank, without padding."""
        return self.spans_of(self.rank)

    def spans_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the `spans` of another rank."""
        starts = [piece * self.piece_length for piece in self.piece_numbers_of(rank)]
        bounds = [(start, start + self.piece_length) for start in starts]
        return [(min(start, self.length), min(stop, self.length)) for start, stop in bounds]

    def list_all_spans(self) -> list[tuple[int, int]]:
        """List the spans of all ranks, without the pieces that are only padding."""
        spans = [span for rank in range(self.size) for span in self.spans_of(rank)]
        return [(start, stop) for start, stop in spans if start < stop]

    def take(self, x: Tensor, dim: int, *, fill: float = 0) -> Tensor:
        """Return this rank's slice of a whole tensor, padded with `fill`."""
        pieces = [x.narrow(dim, start, stop - start) for start, stop in self.spans]
        missing = self.local_length - sum(piece.shape[dim] for piece in pieces)
        if not missing and len(pieces) == 1:
            # A view would keep the whole tensor alive. In a dimension of size 1, a view also has
            # the stride of the whole tensor, for which torch.compile would make another graph.
            return pieces[0].clone(memory_format=torch.contiguous_format)
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([*pieces, x.new_full(shape, fill)], dim)

    def take_shared(self, whole: Tensor, dim: int, *, fill: float = 0) -> Tensor:
        """Return this rank's slice of a tensor that all layers receive; reuse it if possible."""
        if whole.requires_grad:  # each recompute in backward needs a graph of its own
            return self.take(whole, dim, fill=fill)
        known = self._shared.get(id(whole))
        if known is None or known[0]() is not whole:
            alive = {key: entry for key, entry in self._shared.items() if entry[0]() is not None}
            known = weakref.ref(whole), self.take(whole, dim, fill=fill)
            self._shared = {**alive, id(whole): known}
        return known[1]

    def find_whole(self, x: Tensor) -> Tensor | None:
        """Return the whole tensor from which `take_shared` made the slice `x`, if it is alive."""
        return next((whole() for whole, own in self._shared.values() if own is x), None)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Restore the order of the tokens in a tensor with the slices of all ranks along `dim`."""
        if self.is_in_order:
            return x.narrow(dim, 0, self.length)
        return x.index_select(dim, self._find_indices(x.device)[1])

    def arrange_by_rank(self, x: Tensor) -> Tensor:
        """Undo `join` along dim 1: return the slices of all ranks in turn, padded with zeros."""
        missing = self.local_length * self.size - self.length
        padded = functional.pad(x, (*(0, 0) * (x.ndim - 2), 0, missing))
        if self.is_in_order:
            return padded
        return padded.index_select(1, self._find_indices(x.device)[0])

    def _find_indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._indices:
            pieces = torch.arange(len(self.order) * self.piece_length).view(-1, self.piece_length)
            by_rank = pieces[torch.tensor(list(self.order))].flatten()
            inverse = by_rank.argsort()[: self.length]
            self._indices[device] = by_rank.to(device), inverse.to(device)
        return self._indices[device]


def make_zigzag_order(cp_size: int, sp_size: int = 1) -> list[int]:
    """Return the numbers of the pieces in the order of the ranks, for zigzag order.

    For cp_size=2 the result is [0, 3, 1, 2], and for sp_size=2 as well [0, 1, 6, 7, 2, 3, 4, 5].
    """
    return [
        chunk * sp_size + piece
        for rank in range(cp_size)
        for chunk in (rank, 2 * cp_size - 1 - rank)
        for piece in range(sp_size)
    ]


def gather_slices(x: Tensor, part: Slice) -> Tensor:
    """All-gather slices (B, S / N, ...) to (B, S, ...). Backward adds the gradients of all ranks.

    Every rank sends N - 1 tensors of the size of `x` in forward, and as many in backward.
    """
    if part.size == 1:  # packed rows that are not split (split.py) have no group
        return x
    return _Gather.apply(x, part)


class StartedGather:
    """An all-gather like `gather_slices` that runs while other code computes.

    In forward, the all-gather runs from the creation of this object until `wait`. Backward starts
    to send the gradients when it reaches `wait`, and waits for them when it reaches the creation.
    In between, autograd runs the backward of what the forward has computed in between.
    """

    def __init__(self, x: Tensor, part: Slice) -> None:
        self._part, self._running = part, _Running()
        self._received = _StartGather.apply(x, part, self._running)

    def wait(self) -> Tensor:
        """Return the gathered tensor, (B, S, ...)."""
        received, self._received = self._received, None
        return _FinishGather.apply(received, self._part, self._running)


class _Running:
    """The transfer of a `StartedGather` that is running: of slices, or of gradients in backward."""

    def __init__(self) -> None:
        self.transfer: Transfer | None = None

    def wait(self) -> Tensor:
        """Return the received tensor, and forget the transfer, which keeps its tensors alive."""
        transfer, self.transfer = self.transfer, None
        assert transfer is not None
        return transfer.wait()


def sum_slices(x: Tensor, part: Slice) -> Tensor:
    """Sum a scalar over the group. Backward adds the gradients of all ranks as well."""
    return _Sum.apply(x, part)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        gathered = part.join(all_gather(x, part.group).movedim(0, 1).flatten(1, 2), 1)
        # An in-place operator on a view would lose the hook that FSDP2 registers on the output.
        return gathered.clone() if is_view(gathered) else gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        by_owner = part.arrange_by_rank(grad).unflatten(1, (part.size, -1)).movedim(1, 0)
        return swap_slices(by_owner, part.group).sum(0), None


class _StartGather(torch.autograd.Function):
    """Start the all-gather of a `StartedGather`. The result is a buffer that is not yet written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice, running: _Running) -> Tensor:
        ctx.running = running
        running.transfer = start_all_gather(x, part.group)
        # Autograd lets the result refer to this node, so `running` must not hold the same object.
        return running.transfer.received.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.running.wait().sum(0), None, None


class _FinishGather(torch.autograd.Function):
    """Wait for the all-gather. Backward starts to send the gradients to their owners."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, part: Slice, running: _Running) -> Tensor:
        ctx.part, ctx.running = part, running
        running.wait()
        return part.join(received.movedim(0, 1).flatten(1, 2), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        by_owner = part.arrange_by_rank(grad).unflatten(1, (part.size, -1)).movedim(1, 0)
        ctx.running.transfer = start_swap(by_owner, part.group)
        # The received gradients are not written yet, and anomaly detection would read them.
        return grad.new_zeros(()).expand(by_owner.shape), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        return _sum_in_rank_order(x, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_in_rank_order(grad, ctx.part), None


def _sum_in_rank_order(x: Tensor, part: Slice) -> Tensor:
    """Sum a scalar over the group; all ranks add the gathered numbers in the same order."""
    return all_gather(x, part.group).sum()
