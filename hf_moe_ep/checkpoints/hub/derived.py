"""Derive pieces from traced tensors: which box of a checkpoint tensor is which box of a parameter.

With `traced.py`, transformers' conversion runs on tensors that record the coordinates (parameter,
index in each dim) of each element. For each dim of a converted tensor there is an array with one
row per index, and the coordinates of an element are `Traced.base` plus one row of each of these
arrays. `PieceFinder` turns these arrays into pieces: a piece is a box of the converted tensor,
viewed in another shape, that holds a box of one parameter.

Worked example, two experts with F = 3: parameter 7, gate_up [2, 6, 5], is saved as w13 [2, 6, 5]
with gate and up rows interleaved. Each row of an expert in w13 is this row in the parameter:

    row in w13              0   1   2   3   4   5
    row in the parameter    0   3   1   4   2   5

    _split_axis       finds that the array is the sum of 0 1 2 (one number per pair) and 0 3 (the
                      two numbers of a pair): the dim is [3, 2] in the view, with steps 1 and 3
    _join_dims        joins neighbouring dims if one continues the other; here it joins none
    _find_boxes       keeps the longer of the two dims that run along the rows, [3], whole, and
                      makes one box for each index of the other dim, [2]
    -> two pieces     w13 viewed as [2, 3, 2, 5]:  [:, :, 0, :] starts at row 0,
                                                   [:, :, 1, :] starts at row 3
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.hub.traced import COORDINATES, ZEROS, Axis, Traced, Untraceable

# The indices of a long dim are compared in blocks of this size, which bounds the memory.
_INDICES_PER_BLOCK = 1 << 16


class PieceFinder:
    """Finds the pieces of traced tensors, and computes results for the same arrays only once."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Axis, list[_Run]]] = {}
        self._boxes: dict[tuple[int, ...], list[Piece]] = {}

    def find(
        self, key: str, tensor: Traced, num_dims: Sequence[int]
    ) -> Iterator[tuple[int, Piece]]:
        """Yield (number of the parameter, piece) for each piece of a checkpoint tensor.

        Args:
            num_dims: the number of dims of each parameter.
        """
        ids = tuple(id(axis) for axis in tensor.axes)
        if ids not in self._boxes:
            runs = [self._find_cached_runs(axis) for axis in tensor.axes]
            shape = tuple(map(len, tensor.axes))
            self._boxes[ids] = [
                box for chosen in product(*runs) for box in _find_boxes(shape, chosen)
            ]
        base = tensor.base.tolist()
        for box in self._boxes[ids]:
            number, *start = map(operator.add, base, box.start)
            ndim = len(start) if number == ZEROS else num_dims[number]
            piece = replace(
                box,
                key=key,
                start=tuple(start[:ndim]),
                sizes=box.sizes[:ndim],
                axes=box.axes[:ndim],
                steps=box.steps[:ndim],
            )
            yield number, piece

    def _find_cached_runs(self, axis: Axis) -> list[_Run]:
        axis_and_runs = self._runs.get(id(axis))
        if axis_and_runs is None:
            # The axis is stored too, so that it stays alive and no other array gets the same id.
            axis_and_runs = self._runs[id(axis)] = axis, _find_runs(axis)
        return axis_and_runs[1]


@dataclass(frozen=True)
class _Dim:
    """A range of indices along one dim of a view.

    Attributes:
        view_size: the size of the whole dim.
        start, size: the range.
        step: the numbers that each index adds to the coordinates.
    """

    view_size: int
    start: int
    size: int
    step: np.ndarray


@dataclass(frozen=True)
class _Run:
    """Consecutive indices of one dim of a checkpoint tensor, viewed as a grid.

    Attributes:
        first: the coordinates of the first index.
        dims: the dims of the grid, the outermost first. The next index along one of them always
            adds the same numbers to the coordinates, the `step` of this dim.
    """

    first: np.ndarray
    dims: list[_Dim]


def _find_runs(axis: Axis) -> list[_Run]:
    """Describe a dim of a tensor as one run with several dims of a view, or as consecutive runs.

    Rows 0 3 1 4 2 5 are one run with two dims, [3, 2]. Rows 0 1 2 of parameter 7 followed by rows
    0 1 of parameter 8 have no such form: they are two runs, [0, 3) and [3, 5) of one dim.
    """
    factors = _split_axis(axis)
    if factors is not None:
        return [_Run(axis[0], [_Dim(size, 0, size, step) for size, step in factors])]
    runs, start = [], 0
    while start < len(axis):
        stop = start + 1
        if stop < len(axis):
            step = axis[stop] - axis[start]
            stop = start + _count_equal_steps(axis[start:], step)
            # If this step leads to another parameter, and steps of another kind follow, then this
            # index is a run of its own.
            if step[0] and stop < len(axis):
                stop = start + 1
        step = axis[stop - 1] - axis[stop - 2] if stop > start + 1 else np.zeros_like(axis[0])
        runs.append(_Run(axis[start], [_Dim(len(axis), start, stop - start, step)]))
        start = stop
    return runs


def _split_axis(axis: Axis) -> list[tuple[int, np.ndarray]] | None:
    """Split a dim into several dims (size, step), outermost first; None if that is impossible.

    0 3 1 4 2 5 is a table of 3 rows. A row ends where the step changes first, so it has length 2:

        0 3      rows begin at 0 1 2: 3 indices with step 1
        1 4      within a row:        2 indices with step 3
        2 5      -> [(3, 1), (2, 3)]

    0 1 2 10 11 12 20 21 22 gives [(3, 10), (3, 1)]; the beginnings of the rows, 0 10 20, are split
    by the same function. 0 1 2 5 7 gives None, because 3 does not divide its length of 5.
    """
    if len(axis) == 1:
        return []
    step = axis[1] - axis[0]
    length = _count_equal_steps(axis, step)
    if length == len(axis):
        return [(length, step)]
    if len(axis) % length:
        return None
    table = axis.reshape(-1, length, axis.shape[1])
    outer, inner = table[:, 0], table[0] - table[0, 0]
    if not np.array_equal(outer[:, None] + inner[None], table):
        return None
    outer_dims = _split_axis(outer)
    return None if outer_dims is None else [*outer_dims, (length, step)]


def _count_equal_steps(axis: Axis, step: np.ndarray) -> int:
    """Count the indices, from the first one on, that follow each other in steps of `step`."""
    for start in range(0, len(axis) - 1, _INDICES_PER_BLOCK):
        steps = np.diff(axis[start : start + _INDICES_PER_BLOCK + 1], axis=0)
        breaks = np.flatnonzero((steps != step).any(1))
        if len(breaks):
            return start + int(breaks[0]) + 1
    return len(axis)


def _join_dims(dims: list[_Dim]) -> list[_Dim]:
    """Join neighbouring dims if each step of the outer dim continues where the inner dim ends.

    [4, step 3] and [3, step 1] run through 0 1 2, 3 4 5, .. and become [12, step 1]. [3, step 1]
    and [2, step 3] (0 3, 1 4, 2 5) are not joined, nor is a dim of which only a part is used.
    """
    joined: list[_Dim] = []
    for inner in dims:
        outer = joined[-1] if joined else None
        if (
            outer is not None
            and outer.size == outer.view_size
            and inner.size == inner.view_size
            and np.array_equal(outer.step, inner.size * inner.step)
        ):
            size = outer.size * inner.size
            joined[-1] = _Dim(size, 0, size, inner.step)
        else:
            joined.append(inner)
    return joined


def _find_boxes(shape: tuple[int, ...], runs: Sequence[_Run]) -> Iterator[Piece]:
    """Yield the boxes of a view, each of which holds elements of one parameter.

    A box is a `Piece` without a key. Its `start` is (parameter, index in each dim), relative to
    `Traced.base`. `sizes` and `axes` have as many dims as a parameter can have, and end in 1 and
    None for a parameter with fewer dims; the example leaves these out.

    For each dim of a parameter, the longest dim of the view that runs along it stays whole. The
    other dims of the view are split up into one box per index: dims that lead from one parameter to
    the next, and shorter dims that run along the same dim of a parameter. In a view
    [2 experts, 3, 2, H] whose second and third dim both run along the rows, the third is split up:

        box [:, :, 0, :]    start (7, 0, 0, 0)   sizes (2, 3, H)   axes (0, 1, 3)
        box [:, :, 1, :]    start (7, 0, 3, 0)   sizes (2, 3, H)   axes (0, 1, 3)
    """
    dims = _join_dims([dim for run in runs for dim in run.dims])
    view_dim_of: dict[int, int] = {}  # by coordinate: the dim of the view that stays whole
    for index, dim in sorted(enumerate(dims), key=lambda item: -item[1].size):
        changing = np.flatnonzero(dim.step)
        if not len(changing) and dim.size > 1:
            raise Untraceable("a checkpoint tensor repeats elements of a parameter")
        if len(changing) == 1:
            coordinate = int(changing[0])
            if coordinate and coordinate not in view_dim_of and dim.step[coordinate] > 0:
                view_dim_of[coordinate] = index
    split = [index for index in range(len(dims)) if index not in view_dim_of.values()]
    sizes, steps = [1] * (COORDINATES - 1), [1] * (COORDINATES - 1)
    axes: list[int | None] = [None] * (COORDINATES - 1)
    for coordinate, index in view_dim_of.items():
        sizes[coordinate - 1] = dims[index].size
        steps[coordinate - 1] = int(dims[index].step[coordinate])
        axes[coordinate - 1] = index
    for offsets in product(*(range(dims[index].size) for index in split)):
        corner = [dim.start for dim in dims]
        first = sum((run.first for run in runs), np.zeros(COORDINATES, np.int64))
        for index, offset in zip(split, offsets, strict=True):
            corner[index] += offset
            first = first + offset * dims[index].step
        yield Piece(
            key="",
            shape=shape,
            start=tuple(first.tolist()),
            sizes=tuple(sizes),
            axes=tuple(axes),
            view=tuple(dim.view_size for dim in dims),
            corner=tuple(corner),
            steps=tuple(steps),
        )
