"""Trace how transformers' conversion rearranges parameters, with tensors that have no values.

When transformers saves a model, its conversion turns the parameters in memory into the tensors of a
checkpoint. A `Traced` tensor has no values. For each element it records from which parameter the
element comes, and from which index. If the conversion runs on such tensors, its results show how
checkpoint tensors are made up of parameters, so this package needs no conversion code of its own.

Parameters are numbered. The element [e, o, i] of parameter n has the coordinates (n, e, o, i, 0,
0). After each view, transposition or concatenation, the coordinates of the elements are a base plus
one term per dim:

    tensor                      base               terms
    parameter 7, [2, 6, 5]      (7, 0, 0, 0, ..) + (0, e, 0, 0, ..) + (0, 0, o, 0, ..) + ..
    its rows 3 to 5             (7, 0, 3, 0, ..) + (0, e, 0, 0, ..) + (0, 0, o, 0, ..) + ..
    expert 1 of these rows      (7, 1, 3, 0, ..) + (0, 0, o, 0, ..) + (0, 0, 0, i, ..)

A traced tensor therefore needs memory for its dims, not for its elements. `Untraceable` is raised
if the coordinates of a tensor cannot be a sum of this kind, or if the conversion calls a torch
function that this module does not list. A conversion may pad a tensor with zeros; these zeros count
as elements of a parameter with the number ZEROS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

# A parameter's number and up to five indices, as the kernel of a 3d convolution has.
COORDINATES = 6
# The indices of a long dim are numbered in blocks of this size, which bounds the memory.
_INDICES_PER_BLOCK = 1 << 20

# The number of the parameter to which all padding zeros belong.
ZEROS = -1

# The terms of one dim, [size, COORDINATES]: the numbers that each index adds to the coordinates.
Axis = np.ndarray
# The terms of all dims, or functions that compute these terms.
Axes = tuple[Axis, ...] | list[Callable[[], Axis]]

# All traced tensors are views of this tensor, because they have no values.
_EMPTY = torch.empty(0)


class Untraceable(ValueError):
    """The conversion has called an operation that this module cannot trace."""


class Traced(torch.Tensor):
    """A tensor without values, made up of rearranged elements of one or several parameters.

    Attributes:
        base: the part of the coordinates that all elements have in common.
        axes: for each dim, the terms that its indices add to `base`.
    """

    base: np.ndarray

    @staticmethod
    def __new__(cls: type[Traced], base: np.ndarray, axes: Axes) -> Traced:
        return _EMPTY.as_subclass(cls)

    def __init__(self, base: np.ndarray, axes: Axes) -> None:
        self.base, self._axes = base, axes

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The terms of all dims. Most tensors are only renamed, so the first use computes them."""
        if isinstance(self._axes, list):
            self._axes = tuple(make() for make in self._axes)
        return self._axes

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(len(axis) for axis in self.axes)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.axes)

    def dim(self) -> int:
        return len(self.axes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else len(self.axes[dim])

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self, memory_format: Any = None) -> Traced:
        return self

    def clone(self, **_: Any) -> Traced:
        return self

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Traced, ...]:
        length = len(self.axes[dim])
        if isinstance(split_size, int):
            starts = range(0, length, split_size)
            split_size = [min(split_size, length - start) for start in starts]
        if sum(split_size) != length:
            raise Untraceable(f"cannot split {length} into {list(split_size)}")
        dim, start, parts = dim % self.ndim, 0, []
        for size in split_size:
            axis = self.axes[dim][start : start + size]
            parts.append(Traced(self.base, (*self.axes[:dim], axis, *self.axes[dim + 1 :])))
            start += size
        return tuple(parts)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
        return self.split(-(-len(self.axes[dim]) // chunks), dim)

    def unbind(self, dim: int = 0) -> tuple[Traced, ...]:
        return tuple(self.select(dim, index) for index in range(len(self.axes[dim])))

    def select(self, dim: int, index: Any) -> Traced:
        dim %= self.ndim
        axes = (*self.axes[:dim], *self.axes[dim + 1 :])
        return Traced(self.base + self.axes[dim][index], axes)

    def __getitem__(self, index: Any) -> Traced:
        """Take elements by integers and slices, or by slices and one list of integers."""
        indices = index if isinstance(index, tuple) else (index,)
        kinds = [type(i) for i in indices]
        max_lists = 0 if int in kinds else 1  # an index has no list beside an integer
        if not {int, slice, list}.issuperset(kinds) or kinds.count(list) > max_lists:
            raise Untraceable(f"cannot take the elements {index!r}")
        taken, dim = self, 0
        for i in indices:
            if isinstance(i, int):
                taken = taken.select(dim, i)
                continue
            axes = taken.axes
            taken = Traced(taken.base, (*axes[:dim], axes[dim][i], *axes[dim + 1 :]))
            dim += 1
        return taken

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Traced:
        start, end = start_dim % self.ndim, end_dim % self.ndim
        return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Traced:  # type: ignore[override]
        dim %= self.ndim
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def squeeze(self, dim: int | None = None) -> Traced:  # type: ignore[override]
        if dim is not None:
            return self.select(dim, 0) if len(self.axes[dim]) == 1 else self
        # transformers 5.17 calls squeeze() without a dim on each chunk of a weight.
        squeezed = self
        for axis in reversed(range(self.ndim)):
            squeezed = squeezed.squeeze(axis)
        return squeezed

    def unsqueeze(self, dim: int) -> Traced:
        dim %= self.ndim + 1
        return Traced(self.base, (*self.axes[:dim], _make_zero_terms(1), *self.axes[dim:]))

    def transpose(self, dim0: int, dim1: int) -> Traced:
        axes = list(self.axes)
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return Traced(self.base, tuple(axes))

    def permute(self, *dims: Any) -> Traced:
        return Traced(self.base, tuple(self.axes[dim] for dim in _unpack_dims(dims)))

    def reshape(self, *shape: Any) -> Traced:
        return _split_and_merge_dims(self, _unpack_dims(shape))

    def view(self, *shape: Any) -> Traced:
        return _split_and_merge_dims(self, _unpack_dims(shape))

    def new_zeros(self, *size: Any, **_: Any) -> Traced:
        return Tracer().tensor(ZEROS, _unpack_dims(size))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        traced_function = _FUNCTIONS.get(func)
        if traced_function is None:
            name = getattr(func, "__name__", str(func))
            raise Untraceable(f"the conversion calls {name}, which cannot be traced")
        return traced_function(*args, **(kwargs or {}))


class Tracer:
    """Makes the traced tensors of parameters. Dims of equal index and size share an array."""

    def __init__(self) -> None:
        self._axes: dict[tuple[int, int], Axis] = {}

    def tensor(self, number: int, shape: Sequence[int]) -> Traced:
        """Make the traced tensor of parameter `number`."""
        if len(shape) >= COORDINATES:
            raise Untraceable(f"a tensor with {len(shape)} dims, {tuple(shape)}, cannot be traced")
        base = np.zeros(COORDINATES, np.int64)
        base[0] = number
        return Traced(base, [partial(self._terms_along, dim + 1, n) for dim, n in enumerate(shape)])

    def _terms_along(self, coordinate: int, size: int) -> Axis:
        """Return the terms of a dim whose index i adds i to one coordinate."""
        if (coordinate, size) not in self._axes:
            axis = _make_zero_terms(size)
            for start in range(0, size, _INDICES_PER_BLOCK):
                stop = min(start + _INDICES_PER_BLOCK, size)
                axis[start:stop, coordinate] = np.arange(start, stop)
            self._axes[coordinate, size] = axis
        return self._axes[coordinate, size]


def _make_zero_terms(size: int) -> Axis:
    # In this order in memory, the columns that stay 0 take no memory.
    return np.zeros((COORDINATES, size), np.int64).T


def _concatenate(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    first = tensors[0]
    if len(tensors) == 1:
        return first
    dim %= first.ndim
    parts = []
    for tensor in tensors:
        # The base of each tensor becomes part of the terms of the concatenated dim.
        start = sum((axis[0] for axis in tensor.axes), tensor.base)
        for number, (axis, expected) in enumerate(zip(tensor.axes, first.axes, strict=True)):
            same = axis is expected or np.array_equal(axis - axis[:1], expected - expected[:1])
            if number != dim and not same:
                raise Untraceable("the conversion concatenates tensors of different arrangements")
        parts.append(tensor.axes[dim] - tensor.axes[dim][:1] + start)
    axes = [axis - axis[:1] if axis[0].any() else axis for axis in first.axes]
    axes[dim] = np.concatenate(parts)
    return Traced(np.zeros(COORDINATES, np.int64), tuple(axes))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _concatenate([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _split_and_merge_dims(tensor: Traced, shape: Sequence[int]) -> Traced:
    """Split and merge dims, [E, 2F, H] to [E, 2, F, H] or [E * 2F, H] and back.

    The new dims are made one after the other. For each, dims of the tensor are merged until the
    merged dim has at least the new size. If the merged dim is larger, it is split into the new size
    and a rest, with which the next new dim begins.
    """
    sizes = list(shape)
    if -1 in sizes:
        # The product of all sizes contains the -1: it is the negative product of the others.
        sizes[sizes.index(-1)] = tensor.numel() // -math.prod(sizes)
    if math.prod(sizes) != tensor.numel():
        raise Untraceable(f"cannot reshape {tuple(tensor.shape)} into {tuple(shape)}")
    base, axes = tensor.base, list(tensor.axes)
    result: list[Axis] = []
    while sizes:
        size = sizes.pop(0)
        axis = axes.pop(0) if axes else _make_zero_terms(1)
        while len(axis) < size:
            next_axis = axes.pop(0)
            axis = (axis[:, None] + next_axis[None]).reshape(-1, COORDINATES)
        if len(axis) > size:
            refusal = f"cannot trace the reshape of {tuple(tensor.shape)} into {tuple(shape)}"
            if len(axis) % size:
                raise Untraceable(refusal)
            table = axis.reshape(size, -1, COORDINATES)
            outer, inner = table[:, 0], table[0] - table[0, 0]
            if not np.array_equal(outer[:, None] + inner[None], table):
                raise Untraceable(refusal)
            axis = outer
            axes.insert(0, inner)
        result.append(axis)
    for axis in axes:  # the remaining dims have size 1
        base = base + axis[0]
    return Traced(base, tuple(result))


def _unpack_dims(dims: Sequence[Any]) -> Sequence[int]:
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _concatenate,
    torch.stack: _stack,
    torch.chunk: Traced.chunk,
    torch.split: Traced.split,
    torch.unbind: Traced.unbind,
    torch.transpose: Traced.transpose,
    torch.permute: Traced.permute,
    torch.squeeze: Traced.squeeze,
    torch.unsqueeze: Traced.unsqueeze,
    torch.reshape: Traced.reshape,
}
