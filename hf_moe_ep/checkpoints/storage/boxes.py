"""Boxes: which elements of a tensor a file or a rank holds, [start, stop) of every dim.

    of a tensor [4, 6]                   overlap of both            in a tensor of the rank's
    rank 1 holds     (2, 4), (0, 6)      (2, 4), (3, 6)             rows 0 to 2, columns 3 to 6
    a file holds     (0, 4), (3, 6)

A sharded tensor's box on a rank follows from its mesh and placements alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# [start, stop) of every dim.
Box = tuple[tuple[int, int], ...]


def overlap(one: Box, other: Box) -> Box | None:
    """Return the elements that both hold, None without any."""
    pairs = zip(one, other, strict=True)
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
    return box if all(start < stop for start, stop in box) else None


def slices(part: Box, origin: Box) -> tuple[slice, ...]:
    """Find where `part` of a parameter lies in a tensor that holds `origin` of it."""
    pairs = zip(part, origin, strict=True)
    return tuple(slice(a - at, b - at) for (a, b), (at, _) in pairs)


def whole(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield a tensor that is here whole, as the one part of itself."""
    yield tuple((0, size) for size in tensor.shape), tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """Find the part of a parameter that this rank holds, as `shard.py` and FSDP2 cut it."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    box = box_at(tensor, coordinate)
    held, local = tuple(stop - start for start, stop in box), tuple(tensor.to_local().shape)
    assert held == local, f"{held} is not {local}"
    return box


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Find the part of a parameter that the rank at `coordinate` of its mesh holds."""
    cuts = [
        None if isinstance(placement, Replicate) else placement.dim  # type: ignore[attr-defined]
        for placement in tensor.placements
    ]
    return cut_box(tensor.shape, tensor.device_mesh.shape, cuts, coordinate)


def cut_box(
    shape: Sequence[int],
    grid: Sequence[int],
    cuts: Sequence[int | None],
    coordinate: Sequence[int],
) -> Box:
    """Find the part of a tensor at `coordinate` of a grid whose axes cut these dims, or none."""
    box = [(0, size) for size in shape]
    # The ep axis is the last one and was cut first; FSDP2 cuts what it left.
    for axis in reversed(range(len(grid))):
        dim = cuts[axis]
        if dim is None:
            continue
        start, stop = box[dim]
        share = -(-(stop - start) // grid[axis])
        cut = [min(start + (coordinate[axis] + i) * share, stop) for i in (0, 1)]
        box[dim] = (cut[0], cut[1])
    return tuple(box)
