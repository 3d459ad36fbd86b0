"""Derive pieces from traced tensors: which box of a checkpoint tensor is which box of a parameter.

`traced.py` runs transformers' conversion on tensors whose elements know their coordinates
(parameter, index in each dim). The coordinates along every dim of a result are known as an array,
one row per index. This file turns these arrays into boxes. Worked example, two experts with F = 3:
gate_up of parameter 7, [2, 6, 5], is saved as w13 [2, 6, 5] with gate and up rows interleaved. The
second dim of w13 adds to the parameter's row number:

    index along the dim of w13    0   1   2   3   4   5
    row of the parameter          0   3   1   4   2   5

    _split_axis       the array is the sum of 0 1 2 (one per pair) and 0 3 (within a pair), so the
                      dim is [3, 2] in the view, with steps 1 and 3
    _join_dims        neighbouring dims that count on without a gap become one dim: none here
    _boxes            two dims of the view run along the rows. The longer one, [3], stays; the other
                      one, [2], is split up: one box per index
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


class PieceFinder:
    """Finds the pieces of traced tensors; results for the same axes are computed once."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Axis, list[_Run]]] = {}
        self._boxes: dict[tuple[int, ...], list[Piece]] = {}

    def pieces(self, key: str, tensor: Traced, ranks: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """Yield (number of the parameter, piece) for all that a checkpoint tensor holds.

        Args:
            ranks: the number of dims of each parameter.
        """
        axes = tuple(id(axis) for axis in tensor.axes)
        if axes not in self._boxes:
            runs = [self._runs_of(axis) for axis in tensor.axes]
            shape = tuple(map(len, tensor.axes))
            self._boxes[axes] = [box for chosen in product(*runs) for box in _boxes(shape, chosen)]
        base = tensor.base.tolist()
        for box in self._boxes[axes]:
            number, *start = map(operator.add, base, box.start)
            ndim = len(start) if number == ZEROS else ranks[number]
            piece = replace(
                box,
                key=key,
                start=tuple(start[:ndim]),
                sizes=box.sizes[:ndim],
                axes=box.axes[:ndim],
                steps=box.steps[:ndim],
            )
            yield number, piece

    def _runs_of(self, axis: Axis) -> list[_Run]:
        known = self._runs.get(id(axis))
        if known is None:
            # The axis is stored too: it stays alive, so no other array gets its id.
            known = self._runs[id(axis)] = axis, _runs(axis)
        return known[1]


@dataclass(frozen=True)
class _Dim:
    """A range of indices along one dim of a view.

    Attributes:
        view_size: the size of the whole dim.
        start, size: the range.
        step: what each index adds to the coordinates.
    """

    view_size: int
    start: int
    size: int
    step: np.ndarray


@dataclass(frozen=True)
class _Run:
    """A part of a tensor's dim along which coordinates grow evenly.

    Attributes:
        first: the coordinates of its first index.
        dims: the dims of the view that make it up, the outermost first.
    """

    first: np.ndarray
    dims: list[_Dim]


def _runs(axis: Axis) -> list[_Run]:
    """Describe a dim as one run, split into several dims of a view, or as several runs in a row.

    Rows 0 3 1 4 2 5 are one run of two dims, [3, 2]. Rows 0 1 2 of parameter 7 followed by rows 0 1
    of parameter 8 are no such product: they are two runs, [0, 3) and [3, 5) of one dim.
    """
    factors = _split_axis(axis)
    if factors is not None:
        return [_Run(axis[0], [_Dim(size, 0, size, step) for size, step in factors])]
    runs, start = [], 0
    changes = np.diff(axis, axis=0)
    while start < len(axis):
        stop = start + 1
        if stop < len(axis):
            step = changes[start]
            other = np.flatnonzero((changes[start:] != step).any(1))
            stop = start + int(other[0]) + 1 if len(other) else len(axis)
            if step[0] and stop < len(axis):  # the next parameter begins here: end the run
                stop = start + 1
        step = axis[stop - 1] - axis[stop - 2] if stop > start + 1 else np.zeros_like(axis[0])
        runs.append(_Run(axis[start], [_Dim(len(axis), start, stop - start, step)]))
        start = stop
    return runs


def _split_axis(axis: Axis) -> list[tuple[int, np.ndarray]] | None:
    """Split a dim into (size, step) of several dims, outermost first; None if that is impossible.

    0 3 1 4 2 5  is a table of 3 rows of length 2 (up to the first change of the step):

        0 3      rows begin at 0 1 2: 3 indices with step 1
        1 4      within a row:        2 indices with step 3
        2 5      -> [(3, 1), (2, 3)]

    0 1 2 10 11 12 20 21 22 is [(3, 10), (3, 1)]; the rows' beginnings 0 10 20 are split in the same
    way. 0 1 2 5 7 has no such form, because 5 is not divisible by 3: None.
    """
    if len(axis) == 1:
        return []
    changes = np.diff(axis, axis=0)
    other = np.flatnonzero((changes != changes[0]).any(1))
    if not len(other):
        return [(len(axis), changes[0])]
    length = int(other[0]) + 1
    if len(axis) % length:
        return None
    table = axis.reshape(-1, length, axis.shape[1])
    outer, inner = table[:, 0], table[0] - table[0, 0]
    if not np.array_equal(outer[:, None] + inner[None], table):
        return None
    rest = _split_axis(outer)
    return None if rest is None else [*rest, (length, changes[0])]


def _join_dims(dims: list[_Dim]) -> list[_Dim]:
    """Join neighbouring dims of which the outer one counts on where the inner one ends.

    [4, step 3] and [3, step 1] run through 0 1 2, 3 4 5, ..: they are [12, step 1]. [3, step 1] and
    [2, step 3] (0 3, 1 4, 2 5) stay apart. Both dims must be complete.
    """
    joined: list[_Dim] = []
    for dim in dims:
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.size == before.view_size
            and dim.size == dim.view_size
            and np.array_equal(before.step, dim.size * dim.step)
        ):
            size = before.size * dim.size
            joined[-1] = _Dim(size, 0, size, dim.step)
        else:
            joined.append(dim)
    return joined


def _boxes(shape: tuple[int, ...], runs: Sequence[_Run]) -> Iterator[Piece]:
    """Yield the boxes of a view, each of which holds elements of one parameter.

    A box is a piece without a key whose `start` counts (parameter, index in each dim), of as many
    dims as a parameter can have.

    Along each dim of a parameter runs one dim of the view, the longest. The others are split up,
    one box per index: a dim that leads from one parameter to the next, and a second dim along the
    same dim of a parameter. In a view [2 experts, 3, 2, H] of which the second and the third dim
    both run along the rows, the third is split up:

        box [:, :, 0, :]    start (7, 0, 0, 0)   sizes (2, 3, H)   axes (0, 1, 3)
        box [:, :, 1, :]    start (7, 0, 3, 0)   sizes (2, 3, H)   axes (0, 1, 3)
    """
    dims = _join_dims([dim for run in runs for dim in run.dims])
    along: dict[int, int] = {}  # coordinate: dim of the view
    for index, dim in sorted(enumerate(dims), key=lambda item: -item[1].size):
        moved = np.flatnonzero(dim.step)
        if not len(moved) and dim.size > 1:
            raise Untraceable("a checkpoint tensor repeats elements of a parameter")
        if len(moved) == 1 and moved[0] and moved[0] not in along and dim.step[moved[0]] > 0:
            along[int(moved[0])] = index
    split = [index for index in range(len(dims)) if index not in along.values()]
    sizes, steps = [1] * (COORDINATES - 1), [1] * (COORDINATES - 1)
    axes: list[int | None] = [None] * (COORDINATES - 1)
    for coordinate, index in along.items():
        sizes[coordinate - 1] = dims[index].size
        steps[coordinate - 1] = int(dims[index].step[coordinate])
        axes[coordinate - 1] = index
    for indices in product(*(range(dims[index].size) for index in split)):
        corner = [dim.start for dim in dims]
        first = sum((run.first for run in runs), np.zeros(COORDINATES, np.int64))
        for which, index in zip(split, indices, strict=True):
            corner[which] += index
            first = first + index * dims[which].step
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
