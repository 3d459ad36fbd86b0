"""Slices of sequences, one per rank of an sp group, and the collectives that join them.

With `sp` ranks and sequences of S tokens, every rank has ceil(S / sp) tokens of each row of the
batch; the last slices are padded. Both collectives are differentiable:

    gather_slices   (B, S / sp, ...)      to   (B, S, ...) on every rank
    sum_slices      one number per slice  to   their sum on every rank

The exchanges of attention are in `ulysses.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_moe_ep.ranks.collectives import all_gather, swap_slices
from hf_moe_ep.upstream.autograd_modes import is_view

# The keyword argument that carries a Slice.
SLICE = "hf_moe_ep_slice"


class Slice:
    """The slice of one rank: a part of the `length` tokens of each row.

    The number of tokens in a slice is a multiple of `unit`. This is not a dataclass, because FSDP2
    copies every dataclass among the arguments of a unit.
    """

    def __init__(self, group: Any, rank: int, size: int, length: int, unit: int = 1) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.length, self.unit = length, unit
        # The position ids of the whole sequence, where flash attention finds packed documents.
        self.positions: Tensor | None = None
        # The first and the last token + 1 of each document, for each row; None if the rows are not
        # packed. Only set for a model with mixers (sequence/gather.py).
        self.documents: list[list[tuple[int, int]]] | None = None
        # For packed rows: id of a mask -> (mask, mask that separates the documents).
        self.separated: dict[int, tuple[Tensor | None, Tensor]] = {}
        # For tensors that all layers receive: id of the whole tensor -> (whole tensor, slice).
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def local(self) -> int:
        """The number of tokens of each row on one rank, padding included."""
        return -(-self.length // (self.size * self.unit)) * self.unit

    def take(self, x: Tensor, dim: int, *, fill: float = 0) -> Tensor:
        """Return this rank's slice of a whole tensor, padded with `fill`."""
        start = min(self.rank * self.local, self.length)
        part = x.narrow(dim, start, min(self.local, self.length - start))
        missing = self.local - part.shape[dim]
        if not missing:
            return part.clone()  # a view would keep the whole tensor alive
        shape = list(part.shape)
        shape[dim] = missing
        return torch.cat([part, part.new_full(shape, fill)], dim)

    def take_shared(self, whole: Tensor, dim: int, *, fill: float = 0) -> Tensor:
        """Return the slice of a tensor that all layers receive, and reuse it if possible."""
        if whole.requires_grad:  # each recompute in backward needs a graph of its own
            return self.take(whole, dim, fill=fill)
        if id(whole) not in self._shared:
            self._shared[id(whole)] = whole, self.take(whole, dim, fill=fill)
        return self._shared[id(whole)][1]

    def find_whole(self, x: Tensor) -> Tensor | None:
        """Return the whole tensor that `take_shared` has sliced to `x`, or None."""
        return next((whole for whole, part in self._shared.values() if part is x), None)


def gather_slices(x: Tensor, part: Slice) -> Tensor:
    """All-gather slices (B, S / sp, ...) to (B, S, ...); backward adds the gradients of all ranks.

    Every rank sends sp - 1 tensors of the size of `x` in forward, and as many in backward.
    """
    whole: Tensor = _Gather.apply(x, part)
    return whole


def sum_slices(x: Tensor, part: Slice) -> Tensor:
    """Sum a scalar over the group; backward adds the gradients of all ranks as well."""
    total: Tensor = _Sum.apply(x, part)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        whole = all_gather(x, part.group).movedim(0, 1).flatten(1, 2)[:, : part.length]
        # An in-place operator on a view would lose the hook that FSDP2 registers on the output.
        return whole.clone() if is_view(whole) else whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        missing = part.local * part.size - part.length
        padded = functional.pad(grad, (*(0, 0) * (grad.ndim - 2), 0, missing))
        by_owner = padded.unflatten(1, (part.size, -1)).movedim(1, 0)
        return swap_slices(by_owner, part.group).sum(0), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        return _sum(x, part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grad, ctx.part), None


def _sum(x: Tensor, part: Slice) -> Tensor:
    """Sum a scalar over the group. After the all-gather, all ranks add in the same order."""
    return all_gather(x, part.group).sum()
