"""A slice of each sequence per rank of an sp group, and the exchanges between slices.

With `sp` ranks and a length of S tokens every rank has ceil(S / sp) tokens of each row, the last
ones padded. All exchanges are equal parts between the ranks of the group, differentiable, and their
backward is the exchange the other way:

    gather_slices   (B, S / sp, V)          to   (B, S, V) on every rank
    sum_slices      a number of each slice  to   their sum on every rank

What attention exchanges stands in `ulysses.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_moe_ep.ranks.collectives import all_gather, swap_slices
from hf_moe_ep.upstream.autograd_modes import is_view

# The keyword argument that carries a Slice.
SLICE = "hf_moe_ep_slice"


class Slice:
    """A rank's part of the `length` tokens of each row, split over `group` in whole `unit`s.

    No dataclass: FSDP2 makes a new one of every dataclass that it finds among a unit's arguments.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, length: int, unit: int = 1
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.length, self.unit = length, unit
        # What flash attention tells packed documents apart by, for the whole sequence.
        self.positions: Tensor | None = None
        # What all layers share: whole tensors, by their identity, and their slices.
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

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
        shape = list(part.shape)
        shape[dim] = missing
        return torch.cat([part, part.new_full(shape, fill)], dim)

    def take_shared(self, whole: Tensor, dim: int) -> Tensor:
        """Slice, once for all layers that are given the same tensor; each where it is learned."""
        if whole.requires_grad:  # a recompute in backward wants a graph of its own
            return self.take(whole, dim)
        if id(whole) not in self._shared:
            self._shared[id(whole)] = whole, self.take(whole, dim)
        return self._shared[id(whole)][1]


def gather_slices(x: Tensor, part: Slice) -> Tensor:
    """(B, S / sp, V) of every rank to (B, S, V) on all; the gradients of all ranks are added."""
    whole: Tensor = _Gather.apply(x, part)
    return whole


def sum_slices(x: Tensor, part: Slice) -> Tensor:
    """Add a scalar up over the group; its backward adds the gradients of all ranks as well."""
    total: Tensor = _Sum.apply(x, part)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Slice) -> Tensor:
        ctx.part = part
        whole = all_gather(x, part.group).movedim(0, 1).flatten(1, 2)[:, : part.length]
        # No view: FSDP2's hook on an output that is one would be lost to an in-place op.
        return whole.clone() if is_view(whole) else whole

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
    """Add a scalar up, with the additions of every rank in one order."""
    return all_gather(x, part.group).sum()
