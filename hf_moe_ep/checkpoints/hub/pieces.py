"""Describe with `Piece` which box of a checkpoint tensor contains which elements of a parameter.

With 2 experts, F = 3 and H = 5, the parameter gate_up_proj [2, 6, 5] can be stored as

    one key per expert (Qwen3-MoE)                  one tensor [E, in, out] (Qwen3-VL-MoE)
    0.gate_proj [3, 5]  starts at (0, 0, 0)         gate_up_proj [2, 5, 6]  starts at (0, 0, 0),
    0.up_proj   [3, 5]  starts at (0, 3, 0)                                 axes (0, 2, 1)
    1.gate_proj [3, 5]  starts at (1, 0, 0)
    1.up_proj   [3, 5]  starts at (1, 3, 0)         one tensor, gate and up interleaved (Inkling)
                                                    w13 [2, 6, 5], viewed as [2, 3, 2, 5]:
                                                      [:, :, 0, :] starts at (0, 0, 0)
                                                      [:, :, 1, :] starts at (0, 3, 0)

A tensor in a file is contiguous, so a reader may view it in another shape (`Piece.view`). For every
rearrangement that transformers makes, there is a view in which each piece is a box.

A box is one index range [start, stop) per dim. Each rank needs only its shard of a parameter.
`Piece.cut` restricts a piece to a box of the parameter; the result is a smaller piece. For example,
to read rows 2 to 4 of expert 1 from the interleaved w13:

    piece               elements of the parameter       box of the view
    [:, :, 0, :]        expert 1, row 2                 (1, 2), (2, 3), (0, 1), (0, 5)
    [:, :, 1, :]        expert 1, rows 3 and 4          (1, 2), (0, 2), (1, 2), (0, 5)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hf_moe_ep.ranks.boxes import Box, get_box_sizes


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor and the elements of a parameter that it holds.

    Attributes:
        key: the name of the checkpoint tensor.
        shape: the shape of the whole checkpoint tensor.
        start: the index in the parameter of the first element of the piece.
        sizes: the number of indices that the piece holds along each dim of the parameter.
        axes: for each dim of the parameter, the corresponding dim of the view; None where the piece
            holds a single index of the parameter's dim.
        view: the shape in which the checkpoint tensor is viewed.
        corner: the index in the view of the first element of the piece.
        steps: for each dim of the parameter, the distance between the indices of neighbours in the
            piece.
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

    @property
    def box_in_view(self) -> Box:
        """The box of the view that the piece fills."""
        box = [(index, index + 1) for index in self.corner]
        for size, axis in zip(self.sizes, self.axes, strict=True):
            if axis is not None:
                box[axis] = (self.corner[axis], self.corner[axis] + size)
        return tuple(box)

    def cut(self, box: Box) -> Piece | None:
        """Return the part of the piece inside a box of the parameter, or None if it is empty."""
        starts, sizes, corner = [], [], list(self.corner)
        dims = zip(box, self.start, self.sizes, self.steps, self.axes, strict=True)
        for (first, end), start, size, step, axis in dims:
            begin = max(0, -(-(first - start) // step))
            stop = min(size, -(-(end - start) // step))
            if begin >= stop:
                return None
            starts.append(start + begin * step)
            sizes.append(stop - begin)
            if axis is not None:
                corner[axis] += begin
        return replace(self, start=tuple(starts), sizes=tuple(sizes), corner=tuple(corner))

    def slices_in(self, box: Box) -> tuple[slice, ...]:
        """Return the slices that select the piece in a tensor that holds `box` of the parameter."""
        dims = zip(box, self.start, self.sizes, self.steps, strict=True)
        return tuple(
            slice(start - first, start - first + (size - 1) * step + 1, step)
            for (first, _), start, size, step in dims
        )

    def in_view(self, values: Tensor) -> Tensor:
        """Permute values of the parameter to the order of the view's dims, without a copy."""
        # The piece has one index of each dim of the parameter that has no dim in the view.
        varying = [dim for dim, axis in enumerate(self.axes) if axis is not None]
        single = [dim for dim, axis in enumerate(self.axes) if axis is None]
        axes = [axis for axis in self.axes if axis is not None]
        others = [dim for dim in range(len(self.view)) if dim not in axes]
        moved = values.permute((*varying, *single))
        moved = moved.view([*moved.shape[: len(varying)], *(1 for _ in others)])
        order = [*axes, *others]
        return moved.permute([order.index(dim) for dim in range(len(order))])


def cut_pieces(pieces: Iterable[Piece], box: Box) -> dict[str, list[Piece]]:
    """Restrict pieces to a box of their parameter, grouped by checkpoint tensor."""
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        part = piece.cut(box)
        if part is not None:
            by_key.setdefault(piece.key, []).append(part)
    return by_key


def find_filled_box(pieces: Sequence[Piece]) -> Box | None:
    """Return the box of the view that several pieces fill together.

    Interleaved rows that fill a box can be read and written together instead of row by row. The
    result is None for a single piece, and for pieces that do not fill a box.
    """
    if len(pieces) == 1 or any(piece.view != pieces[0].view for piece in pieces):
        return None
    dims = zip(*(piece.box_in_view for piece in pieces), strict=True)
    hull = tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in dims)
    return hull if sum(piece.numel for piece in pieces) == math.prod(get_box_sizes(hull)) else None


def make_whole_piece(key: str, shape: Sequence[int]) -> Piece:
    """Make the piece of a parameter that the checkpoint stores as one tensor of the same shape."""
    sizes = tuple(shape)
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    return Piece(key, sizes, zeros, sizes, tuple(range(len(sizes))), sizes, zeros, ones)


def make_transposed_piece(key: str, shape: Sequence[int]) -> Piece:
    """Make the piece of a parameter that the checkpoint stores with its last two dims exchanged."""
    sizes = tuple(shape)
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    in_file = (*sizes[:-2], *sizes[:-3:-1])
    dims = range(len(sizes))
    axes = (*dims[:-2], *dims[:-3:-1])
    return Piece(key, in_file, zeros, sizes, axes, in_file, zeros, ones)


def make_per_expert_pieces(
    module: str, shape: tuple[int, int, int], names: Sequence[str]
) -> list[Piece]:
    """Make the pieces of a stacked weight [E, out, in] that the checkpoint stores expert by expert.

    A read of these pieces stacks the experts.

    Args:
        module: the name of the experts module.
        names: the names of the tensors that make up the rows of one expert, in order, with {} for
            the number of the expert: ("{}.gate_proj.weight", "{}.up_proj.weight").
    """
    experts, out, inner = shape
    rows = out // len(names)
    size = (rows, inner)
    return [
        Piece(
            key=f"{module}.{name.format(expert)}",
            shape=size,
            start=(expert, i * rows, 0),
            sizes=(1, *size),
            axes=(None, 0, 1),
            view=size,
            corner=(0, 0),
            steps=(1, 1, 1),
        )
        for expert in range(experts)
        for i, name in enumerate(names)
    ]
