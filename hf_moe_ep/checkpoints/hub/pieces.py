"""A part of a parameter, and the part of a checkpoint's tensor that holds it.

Of 2 experts with F = 3, H = 5, gate_up_proj [2, 6, 5] may be

    one key per expert (Qwen3-MoE)             one tensor [E, in, out] (Qwen3-VL-MoE)
    0.gate_proj [3, 5]  at (0, 0, 0)           gate_up_proj [2, 5, 6]  at (0, 0, 0), transposed
    0.up_proj   [3, 5]  at (0, 3, 0)
    1.gate_proj [3, 5]  at (1, 0, 0)           one tensor, gate and up interleaved (Inkling)
    1.up_proj   [3, 5]  at (1, 3, 0)           w13 [2, 6, 5], as [2, 3, 2, 5]:
                                                 [:, :, 0, :] at (0, 0, 0)
                                                 [:, :, 1, :] at (0, 3, 0)

A tensor in a file is memory, row by row, so it may be looked at in another shape, its *view*: then
whatever transformers does to it is a box of the view, its dims in some order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_moe_ep.checkpoints.storage.boxes import Box, slices


@dataclass(frozen=True)
class Part:
    """What a piece and a box of its parameter have in common.

    Attributes:
        slices: of a tensor that holds the box.
        in_file: of the view of the tensor in the file.
    """

    slices: tuple[slice, ...]
    in_file: Box

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.in_file)


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a checkpoint, and which elements of a parameter it holds.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        start: the parameter's element that comes first in the piece.
        sizes: how many indices of each dim of the parameter it holds.
        axes: for each dim of the parameter the dim of the view that runs along it; None for a dim
            of which the piece holds one index.
        view: the shape that `corner` and `axes` mean.
        corner: where in the view the piece begins.
        steps: how far apart the parameter's indices are, of neighbours in the piece.
    """

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    view: tuple[int, ...]
    corner: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, box: Box) -> Part | None:
        """Find what of the piece lies in a part of the parameter, None without any."""
        slices = []
        in_file = [(at, at + 1) for at in self.corner]
        dims = zip(box, self.start, self.sizes, self.steps, self.axes, strict=True)
        for (first, end), start, size, step, axis in dims:
            begin = max(0, -(-(first - start) // step))
            stop = min(size, -(-(end - start) // step))
            if begin >= stop:
                return None
            at = start + begin * step - first
            slices.append(slice(at, at + (stop - begin - 1) * step + 1, step))
            if axis is not None:
                corner = self.corner[axis]
                in_file[axis] = (corner + begin, corner + stop)
        return Part(tuple(slices), tuple(in_file))

    def in_parameter(self, values: Tensor) -> Tensor:
        """Turn values in the order of the view into that of the parameter; the same memory."""
        moved = values.permute(*self._moving, *self._fixed)
        sizes = iter(moved.shape)
        return moved.view([1 if axis is None else next(sizes) for axis in self.axes])

    def in_view(self, values: Tensor) -> Tensor:
        """Turn values in the order of the parameter into that of the view; the same memory."""
        kept = [dim for dim, axis in enumerate(self.axes) if axis is not None]
        others = [dim for dim, axis in enumerate(self.axes) if axis is None]
        moved = values.permute(*kept, *others)
        moved = moved.view([*moved.shape[: len(kept)], *(1 for _ in self._fixed)])
        order = [*self._moving, *self._fixed]
        return moved.permute([order.index(dim) for dim in range(len(order))])

    @property
    def _moving(self) -> list[int]:
        return [axis for axis in self.axes if axis is not None]

    @property
    def _fixed(self) -> list[int]:
        return [dim for dim in range(len(self.view)) if dim not in self._moving]


@dataclass(frozen=True)
class Parts:
    """What pieces of one tensor of a checkpoint and a part of a parameter have in common."""

    parts: list[tuple[Piece, Part]]

    @property
    def key(self) -> str:
        return self.parts[0][0].key

    @property
    def view(self) -> tuple[int, ...]:
        return self.parts[0][0].view

    @property
    def hull(self) -> Box:
        """The smallest box of the view around all parts."""
        dims = zip(*(part.in_file for _, part in self.parts), strict=True)
        return tuple((min(a for a, _ in dim), max(b for _, b in dim)) for dim in dims)

    @property
    def sizes(self) -> list[int]:
        return [stop - start for start, stop in self.hull]

    @property
    def is_filled(self) -> bool:
        """There are several parts, and they fill a box of the view."""
        alike = len(self.parts) > 1 and all(piece.view == self.view for piece, _ in self.parts)
        return alike and sum(part.numel for _, part in self.parts) == math.prod(self.sizes)

    def inside(self, part: Part) -> tuple[slice, ...]:
        """Find a part in a tensor that holds the hull."""
        return slices(part.in_file, self.hull)


def overlaps(pieces: Iterable[Piece], box: Box) -> list[Parts]:
    """Find what of pieces lies in a part of their parameter, by tensor of the checkpoint."""
    found: dict[str, list[tuple[Piece, Part]]] = {}
    for piece in pieces:
        part = piece.overlap(box)
        if part is not None:
            found.setdefault(piece.key, []).append((piece, part))
    return [Parts(parts) for parts in found.values()]


def whole_piece(key: str, shape: Sequence[int]) -> Piece:
    """Describe a parameter that is one tensor of a checkpoint, as in memory."""
    sizes = tuple(shape)
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    return Piece(key, sizes, zeros, sizes, tuple(range(len(sizes))), sizes, zeros, ones)


def transposed_piece(key: str, shape: Sequence[int]) -> Piece:
    """Describe a parameter that is one tensor of a checkpoint, its last two dims exchanged."""
    sizes = tuple(shape)
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    in_file = (*sizes[:-2], *sizes[:-3:-1])
    dims = range(len(sizes))
    axes = (*dims[:-2], *dims[:-3:-1])
    return Piece(key, in_file, zeros, sizes, axes, in_file, zeros, ones)


def per_expert_pieces(
    module: str, shape: tuple[int, int, int], parts: Sequence[str]
) -> list[Piece]:
    """Describe a stacked weight [E, out, in] of which a checkpoint has `parts` of each expert."""
    experts, out, inner = shape
    rows = out // len(parts)
    size = (rows, inner)
    return [
        Piece(
            key=f"{module}.{part.format(expert)}",
            shape=size,
            start=(expert, i * rows, 0),
            sizes=(1, *size),
            axes=(None, 0, 1),
            view=size,
            corner=(0, 0),
            steps=(1, 1, 1),
        )
        for expert in range(experts)
        for i, part in enumerate(parts)
    ]
