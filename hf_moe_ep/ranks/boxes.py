"""Compute with boxes. A box has an index range [start, stop) for each dim of a tensor.

    a tensor [4, 6]                       overlap of both boxes     slices of the overlap in the
    rank 1 holds     (2, 4), (0, 6)       (2, 4), (3, 6)            local tensor of rank 1:
    a file holds     (0, 4), (3, 6)                                 rows 0:2, columns 3:6

The mesh and the placements of a sharded tensor determine the box that each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# [start, stop) of every dim.
Box = tuple[tuple[int, int], ...]


def get_box_sizes(box: Box) -> list[int]:
    """Return the shape of a tensor that holds a box."""
    return [stop - start for start, stop in box]


def make_whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def intersect_boxes(box: Box, other: Box) -> Box | None:
    """Return the box of the elements that are in both boxes, or None if there are none."""
    pairs = zip(box, other, strict=True)
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
    return common if all(start < stop for start, stop in common) else None


def make_slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select the box `inner` in a tensor that holds the box `outer`."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)


def number_elements(outer: Tensor, box: Sequence[tuple[int, int]], shape: Sequence[int]) -> Tensor:
    """Number the elements of a box by their position in a row-major tensor of shape `shape`.

    The box (1, 3), (0, 2) of a tensor [3, 5] has the numbers 5, 6, 10, 11.

    Args:
        outer: the positions along dims before the dims of the box, such as the numbers of experts;
            0 if there are no such dims.
    """
    for (start, stop), size in zip(box, shape, strict=True):
        outer = outer.unsqueeze(-1) * size + torch.arange(start, stop, device=outer.device)
    return outer


def from_even_shards(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Make a DTensor of shards that all have the shape of `local`; the whole tensor is contiguous.

    DTensor.from_local would guess the strides, and guess wrong if several dims have one element.
    """
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(axis)
    whole_stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=whole_stride
    )


def iterate_whole_tensor(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield one pair (box, values) for a tensor that is not sharded."""
    yield make_whole_box(tensor.shape), tensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_local_box(tensor: Tensor) -> Box:
    """Return the box of this rank's shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return make_whole_box(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    box = get_box_at(tensor, coordinate)
    sizes, local_shape = tuple(get_box_sizes(box)), tuple(tensor.to_local().shape)
    assert sizes == local_shape, f"{sizes} is not {local_shape}"
    return box


def get_box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Return the box of the shard that the rank at `coordinate` of the tensor's mesh holds."""
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
    """Return the box that one rank of a grid holds.

    Args:
        shape: the shape of the whole tensor.
        grid: the sizes of the grid's axes.
        cuts: for each axis, the dim of the tensor that it cuts; None for an axis of replicas.
        coordinate: the position of the rank in the grid.
    """
    box = list(make_whole_box(shape))
    # The ep axis is the last axis and cuts first; FSDP2 cuts the resulting shards.
    for axis in reversed(range(len(grid))):
        dim = cuts[axis]
        if dim is None:
            continue
        start, stop = box[dim]
        size = -(-(stop - start) // grid[axis])
        ends = [min(start + (coordinate[axis] + i) * size, stop) for i in (0, 1)]
        box[dim] = (ends[0], ends[1])
    return tuple(box)
