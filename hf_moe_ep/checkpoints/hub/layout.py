"""Which tensors of a checkpoint make up a model, derived from transformers' own conversion.

Traced tensors take the place of the model's parameters and buffers, transformers converts them as
`save_pretrained` would, and what lies where is read off of the results:

    rows of w13 come from     rows 0, F, 1, F+1, ..     as [F, 2]: steps of 1 and of F
    w13 [E, 2F, H]            seen as [E, F, 2, H]      [:, :, 0, :] is rows 0 to F, [:, :, 1, :]
                                                        the others: two pieces

Reading takes what is saved, and also stacked weights as they are in memory (stock writes them so
with save_original_format=False, and Qwen3-VL-MoE always) and the other way round. A weight with
in = out fits both ways; an experts module has another that does not, and all of them are read the
same way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from hf_moe_ep.checkpoints.hub.pieces import (
    Piece,
    per_expert_pieces,
    transposed_piece,
    whole_piece,
)
from hf_moe_ep.checkpoints.hub.traced import (
    COORDINATES,
    ZEROS,
    Axis,
    Traced,
    Tracer,
    Untraceable,
)
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.upstream.conversion import to_hub
from hf_moe_ep.upstream.module_names import canonical_name

_SHOWN = 5

# By parameter, what makes it up; by PADDING, the zeros of which no parameter is made up.
Layout = Mapping[str, list[Piece]]
PADDING = ""
Shape = tuple[int, ...]


def distinct_tensors(model: Any, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Name all that a checkpoint holds, but for the names `without`; tied weights once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if canonical_name(name) not in without:
            found.setdefault(id(tensor), (canonical_name(name), tensor))
    return dict(found.values())


def hub_layout(model: Any, plan: ModelPlan, shapes: Mapping[str, Shape]) -> Layout:
    """List the tensors that a checkpoint of the hub has for each parameter, as they are saved.

    Args:
        model: says how transformers converts it.
        plan: what it says of how a stacked weight is stored goes before that.
        shapes: of the parameters and buffers to be saved, by their names in a stock model.

    Raises:
        ValueError: transformers does what cannot be traced; the tensors are named.
    """
    typed = {name for name in shapes if _is_stacked(name, plan) and _weight(name) in plan.stored}
    layout = _derived(model, {name: shapes[name] for name in shapes if name not in typed})
    found = {
        name: _typed(name, shape, plan) if name in typed else layout[name]
        for name, shape in shapes.items()
    }
    return found | {PADDING: layout[PADDING]}


def _typed(name: str, shape: Shape, plan: ModelPlan) -> list[Piece]:
    stored = plan.stored[_weight(name)]
    if stored.parts:
        experts, out, inner = shape
        return per_expert_pieces(name.rpartition(".")[0], (experts, out, inner), stored.parts)
    return [transposed_piece(name, shape) if stored.transposed else whole_piece(name, shape)]


def _derived(model: Any, shapes: Mapping[str, Shape]) -> Layout:
    names, tracer = list(shapes), Tracer()
    tensors = {name: tracer.tensor(number, shapes[name]) for number, name in enumerate(names)}
    originals = {id(tensor): name for name, tensor in tensors.items()}
    layout: dict[str, list[Piece]] = {name: [] for name in names}
    read_off, ranks = _ReadOff(), [len(shapes[name]) for name in names]
    padding: list[Piece] = []
    key = "its conversion"
    try:
        for key, tensor in to_hub(model, tensors).items():
            name = originals.get(id(tensor))
            if name is not None:
                layout[name].append(whole_piece(key, shapes[name]))
                continue
            for number, piece in read_off.pieces(key, tensor, ranks):
                (padding if number == ZEROS else layout[names[number]]).append(piece)
    except Untraceable as error:
        raise ValueError(
            f"cannot derive how the hub stores this {type(model).__name__}: {key}: {error}; say "
            f"it in a plan, with stored="
        ) from error
    for name, pieces in layout.items():
        held, size = sum(piece.numel for piece in pieces), math.prod(shapes[name])
        if held != size:
            raise ValueError(
                f"cannot derive how the hub stores this {type(model).__name__}: transformers "
                f"writes {held} of the {size} elements of {name}; say it in a plan, with stored="
            )
        pieces.sort(key=lambda piece: piece.start)
    return layout | {PADDING: padding}


class _ReadOff:
    """Reads pieces off of traced tensors; what it found for the same axes it remembers."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Axis, list[_Run]]] = {}
        self._boxes: dict[tuple[int, ...], list[_Box]] = {}

    def pieces(self, key: str, tensor: Traced, ranks: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """Yield (number of the parameter, piece) of all that a tensor holds."""
        axes = tuple(id(axis) for axis in tensor.axes)
        if axes not in self._boxes:
            runs = [self._runs_of(axis) for axis in tensor.axes]
            self._boxes[axes] = [box for chosen in product(*runs) for box in _boxes(chosen)]
        shape, base = tuple(map(len, tensor.axes)), tensor.base.tolist()
        for box in self._boxes[axes]:
            number, *start = map(operator.add, base, box.first)
            end = len(start) if number == ZEROS else ranks[number]
            at = tuple(start[:end])
            piece = Piece(
                key,
                shape,
                at,
                box.sizes[:end],
                box.axes[:end],
                box.view,
                box.corner,
                box.steps[:end],
            )
            yield number, piece

    def _runs_of(self, axis: Axis) -> list[_Run]:
        known = self._runs.get(id(axis))
        if known is None:
            # With the axis, or another one might get its id.
            known = self._runs[id(axis)] = axis, _runs(axis)
        return known[1]


@dataclass(frozen=True)
class _Dim:
    """A dim of a view.

    Attributes:
        view: its size.
        start, size: which of its indices are meant.
        step: what each adds to the coordinates.
    """

    view: int
    start: int
    size: int
    step: np.ndarray


@dataclass(frozen=True)
class _Run:
    """Indices of a tensor's dim along which coordinates grow evenly, and the first ones."""

    first: np.ndarray
    dims: list[_Dim]


@dataclass(frozen=True)
class _Box:
    """What pieces that lie alike have in common; of all coordinates that there may be."""

    first: Shape
    sizes: Shape
    axes: tuple[int | None, ...]
    view: Shape
    corner: Shape
    steps: Shape


def _runs(axis: Axis) -> list[_Run]:
    """Take a dim as one run, as several dims of a view, or as several runs behind each other."""
    factors = _factors(axis)
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
            if step[0] and stop < len(axis):  # on to another tensor, which goes on by itself
                stop = start + 1
        step = axis[stop - 1] - axis[stop - 2] if stop > start + 1 else np.zeros_like(axis[0])
        runs.append(_Run(axis[start], [_Dim(len(axis), start, stop - start, step)]))
        start = stop
    return runs


def _factors(axis: Axis) -> list[tuple[int, np.ndarray]] | None:
    """Find sizes and steps, outermost first, of which an axis is the sum; None without any."""
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
    rest = _factors(outer)
    return None if rest is None else [*rest, (length, changes[0])]


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Make one dim of neighbours that go on where the other ends."""
    merged: list[_Dim] = []
    for dim in dims:
        before = merged[-1] if merged else None
        if (
            before is not None
            and before.size == before.view
            and dim.size == dim.view
            and np.array_equal(before.step, dim.size * dim.step)
        ):
            size = before.size * dim.size
            merged[-1] = _Dim(size, 0, size, dim.step)
        else:
            merged.append(dim)
    return merged


def _boxes(runs: Sequence[_Run]) -> Iterator[_Box]:
    """Yield the boxes of a view, each a part of one parameter.

    One dim of the view runs along each dim of a parameter: the longest. A dim that leads from one
    parameter to another, or along a dim that has one, is taken apart.
    """
    dims = _merged([dim for run in runs for dim in run.dims])
    along: dict[int, int] = {}
    for index, dim in sorted(enumerate(dims), key=lambda item: -item[1].size):
        moved = np.flatnonzero(dim.step)
        if not len(moved) and dim.size > 1:
            raise Untraceable("an element of a parameter stands in several places")
        if len(moved) == 1 and moved[0] and moved[0] not in along and dim.step[moved[0]] > 0:
            along[int(moved[0])] = index
    apart = [index for index in range(len(dims)) if index not in along.values()]
    sizes, steps = [1] * (COORDINATES - 1), [1] * (COORDINATES - 1)
    axes: list[int | None] = [None] * (COORDINATES - 1)
    for coordinate, index in along.items():
        sizes[coordinate - 1] = dims[index].size
        steps[coordinate - 1] = int(dims[index].step[coordinate])
        axes[coordinate - 1] = index
    for indices in product(*(range(dims[index].size) for index in apart)):
        corner = [dim.start for dim in dims]
        first = sum((run.first for run in runs), np.zeros(COORDINATES, np.int64))
        for which, index in zip(apart, indices, strict=True):
            corner[which] += index
            first = first + index * dims[which].step
        yield _Box(
            tuple(first.tolist()),
            tuple(sizes),
            tuple(axes),
            tuple(dim.view for dim in dims),
            tuple(corner),
            tuple(steps),
        )


def find_pieces(
    entries: Mapping[str, Entry], parameters: Mapping[str, Shape], layout: Layout, plan: ModelPlan
) -> dict[str, list[Piece]]:
    """Find what of a checkpoint makes up each parameter, {name: shape}, in whatever layout.

    Raises:
        ValueError: names what is missing and what has another shape than the parameter.
    """
    found: dict[str, list[Piece]] = {}
    missing: dict[str, None] = {}
    misshapen: dict[str, None] = {}
    for group in _groups(parameters, layout, plan):
        layouts = [
            {name: find(name, parameters[name]) for name in group}
            for find in _layouts(layout, plan)
        ]
        fitting = next((one for one in layouts if _fits(one, entries)), None)
        if fitting is None:
            # Of the layout that has the keys, else of the hub's.
            known = [one for one in layouts if all(p.key in entries for p in _all(one))]
            for piece in _all((known or layouts)[0]):
                if piece.key not in entries:
                    missing[piece.key] = None
                elif entries[piece.key].shape != piece.shape:
                    shapes = f"{entries[piece.key].shape} instead of {piece.shape}"
                    misshapen[f"{piece.key} {shapes}"] = None
        found |= fitting or {}
    problems = [
        list_names(kind, names) for kind, names in (("missing", missing), ("misshapen", misshapen))
    ]
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))
    return found


def list_names(kind: str, names: Iterable[str]) -> str:
    """Say "missing 7 tensors: a, b, ..", or nothing without any."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{kind} {len(names)} tensors: {', '.join(names[:_SHOWN])}{more}" if names else ""


def joined(layout: Layout, names: Iterable[str]) -> list[list[str]]:
    """Group parameters that share tensors of the checkpoint, in order of the first of them."""
    group_of: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for name in names:
        shared = {id(g): g for p in layout[name] if (g := group_of.get(p.key)) is not None}
        first, *others = shared.values() or [[]]
        if not first:
            groups.append(first)
        first.append(name)
        for other in others:
            first += other
            groups.remove(other)
        for member in first if others else [name]:
            group_of.update((piece.key, first) for piece in layout[member])
    return groups


def _groups(parameters: Mapping[str, Shape], layout: Layout, plan: ModelPlan) -> list[list[str]]:
    """Group what is read the same way: weights of one experts module, and what shares tensors."""
    groups: dict[str, list[str]] = {}
    for names in joined(layout, parameters):
        stacked = next((name for name in names if _is_stacked(name, plan)), None)
        owner = names[0] if stacked is None else stacked.rpartition(".")[0]
        groups.setdefault(owner, []).extend(names)
    return list(groups.values())


def _is_stacked(name: str, plan: ModelPlan) -> bool:
    module, _, weight = name.rpartition(".")
    return weight in plan.expert_weights and matches(plan.experts, module)


def _weight(name: str) -> str:
    return name.rpartition(".")[2]


def _layouts(layout: Layout, plan: ModelPlan) -> list[Callable[[str, Shape], list[Piece]]]:
    """List the layouts to try: the hub's, as in memory, and the other way round."""

    def other_way(name: str, shape: Shape) -> list[Piece]:
        return [(transposed_piece if _is_stacked(name, plan) else whole_piece)(name, shape)]

    return [
        lambda name, shape: layout[name],
        lambda name, shape: [whole_piece(name, shape)],
        other_way,
    ]


def _all(layout: Layout) -> Iterable[Piece]:
    return (piece for pieces in layout.values() for piece in pieces)


def _fits(layout: Layout, entries: Mapping[str, Entry]) -> bool:
    return all(
        piece.key in entries and entries[piece.key].shape == piece.shape for piece in _all(layout)
    )
