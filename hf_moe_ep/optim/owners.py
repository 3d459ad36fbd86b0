"""Assign each sharded matrix to one rank, its owner, which orthogonalises the whole matrix.

The ranks of a process group that hold the rows of a matrix send them to the owner of the matrix:

    rank 0 holds   rows 0, 1 of a, b, c, d      owns a and b whole     rows 0, 1 of the results
    rank 1 holds   rows 2, 3 of a, b, c, d      owns c and d whole     rows 2, 3 of the results
                                    all-to-all                   all-to-all

Experts that are whole on a rank stay there. If FSDP2 has sharded the rows of the experts of an ep
rank, or if an etp group shares these experts, each rank of that group owns an equal number of them.
All other matrices are assigned in the order of their Newton-Schulz operations, the largest first,
each to the rank that has the fewest operations so far.

The matrices of an owner are divided into buckets: one bucket is sent while the bucket before is
orthogonalised. Values are sent in the dtype of Newton-Schulz, bf16. In a group of g ranks with
equal shards, a rank sends (g - 1) / g of the elements of its shards to the owners, and as an owner
it sends the same number of elements back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.optim.matrices import MatrixLayout
from hf_moe_ep.optim.orthogonal import count_flops
from hf_moe_ep.ranks.boxes import box_at, local_tensor

# The size of what a rank owns in one bucket, unless a single matrix is larger.
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MatrixSharding:
    """How the ranks of a group hold the matrices of a parameter, and which rows this rank has.

    Attributes:
        group: the ranks that together hold each matrix; None if this rank has whole matrices.
        dim: the sharded dim of `MatrixLayout.stacked_view`, 1 or 2.
        bounds: for each rank of the group, the [start, stop) of its shard along `dim`.
        experts: the number of stacked matrices, the same on all ranks of the group.
    """

    group: dist.ProcessGroup | None
    dim: int
    bounds: tuple[tuple[int, int], ...]
    experts: int

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter.

    Attributes:
        name: the name of the parameter.
        layout: how they lie in the parameter.
        shape: [out, in] of each.
        sharding: which of their rows or columns this rank has.
        steps: the steps of Newton-Schulz.
        itemsize: the bytes of an element as it is sent.
    """

    name: str
    layout: MatrixLayout
    shape: tuple[int, int]
    sharding: MatrixSharding
    steps: int
    itemsize: int

    @property
    def flops(self) -> int:
        """The operations of Newton-Schulz for one matrix."""
        return count_flops(*self.shape, self.steps)

    def block(self, stacked_view: Tensor, part: int) -> Tensor:
        """View this rank's share of one part, [E, out, in]; one of the last two dims is sharded."""
        layout, sharding = self.layout, self.sharding
        rows = (0, self.shape[0] * layout.parts)
        if sharding.group is not None and sharding.dim == layout.out_dim:
            rows = sharding.bounds[sharding.rank]
        return layout.block(stacked_view, *rows, part, self.shape[0])

    def lengths(self, part: int) -> list[int]:
        """Return the lengths of all ranks' blocks along the sharded dim."""
        if self.sharding.dim != self.layout.out_dim:
            return [stop - start for start, stop in self.sharding.bounds]
        bounds = [
            self.layout.part_bounds(start, stop, part, self.shape[0])
            for start, stop in self.sharding.bounds
        ]
        return [high - low for low, high in bounds]

    @property
    def sharded_dim(self) -> int:
        """The sharded dim of a block: 1 for `out`, 2 for `in`."""
        return 1 if self.sharding.dim == self.layout.out_dim else 2


@dataclass(frozen=True)
class MatrixRange:
    """Consecutive matrices of one parameter that have the same owner.

    Attributes:
        index: the number of the parameter.
        part: the part of the parameter's layout.
        start, stop: the experts, counted among those of this rank.
    """

    index: int
    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Matrices that are sent in one exchange; rank r of `group` owns those in `ranges[r]`."""

    group: dist.ProcessGroup
    ranges: tuple[tuple[MatrixRange, ...], ...]


def find_sharding(tensor: Tensor, layout: MatrixLayout) -> MatrixSharding:
    """Find how the ranks of a group hold the matrices of a parameter.

    Raises:
        ValueError: two axes of a mesh shard the rows or columns of the matrices.
    """
    first_dim = 0 if layout.stacked else 1  # of `stacked_view`, in which `tensor` has dim 0
    experts = layout.stacked_view(local_tensor(tensor)).shape[0]
    whole = MatrixSharding(None, layout.out_dim, (), experts)
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    axes = []
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh.size(axis) > 1 and dim + first_dim > 0:
            axes.append((axis, dim))
    if not axes:
        return whole
    if len(axes) > 1:
        raise ValueError(
            f"a matrix {tuple(tensor.shape)} is sharded over {len(axes)} axes of its mesh "
            f"{mesh.mesh_dim_names} ({tensor.placements}); Muon can train matrices that one axis "
            f"shards: set expert_shard_dim=0, or leave the parameter to AdamW (param_groups)"
        )
    axis, dim = axes[0]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    bounds = []
    for position in range(mesh.size(axis)):
        at = [*coordinate[:axis], position, *coordinate[axis + 1 :]]
        bounds.append(box_at(tensor, at)[dim])
    sharded_dim = layout.matrix_dim(dim + first_dim)
    return MatrixSharding(mesh.get_group(axis), sharded_dim, tuple(bounds), experts)


def whole_ranges(
    matrices: Sequence[Matrices], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[MatrixRange, ...]]:
    """Yield the matrices that are whole on this rank, in ranges that each fit in a bucket."""
    for index, entry in enumerate(matrices):
        if entry.sharding.group is not None:
            continue
        at_once = max(1, bucket_bytes // _bytes_of_matrix(entry))
        for part in range(entry.layout.parts):
            for start in range(0, entry.sharding.experts, at_once):
                yield (
                    MatrixRange(index, part, start, min(start + at_once, entry.sharding.experts)),
                )


def assign_owners(matrices: Sequence[Matrices], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Assign all sharded matrices to owners. The result is the same on all ranks of a group.

    Returns:
        The buckets in the order in which all ranks must exchange them.
    """
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for index, entry in enumerate(matrices):
        if entry.sharding.group is not None:
            by_group.setdefault(entry.sharding.group, []).append(index)
    buckets = []
    for group, indices in by_group.items():
        owned = _choose_owners(matrices, indices, len(matrices[indices[0]].sharding.bounds))
        divided = [list(_divide(matrices, ranges, bucket_bytes)) for ranges in owned]
        for ranges in zip_longest(*divided, fillvalue=()):
            buckets.append(Bucket(group, ranges))
    return buckets


def _choose_owners(
    matrices: Sequence[Matrices], indices: Sequence[int], num_ranks: int
) -> list[list[MatrixRange]]:
    """Return the ranges of each rank, those of the largest matrices first."""
    owned: list[list[MatrixRange]] = [[] for _ in range(num_ranks)]
    flops = [0] * num_ranks
    single = []
    for index in indices:
        entry = matrices[index]
        each = entry.sharding.experts // num_ranks
        for part in range(entry.layout.parts):
            for rank in range(num_ranks if each else 0):
                owned[rank].append(MatrixRange(index, part, rank * each, (rank + 1) * each))
                flops[rank] += each * entry.flops
            for expert in range(each * num_ranks, entry.sharding.experts):
                single.append(MatrixRange(index, part, expert, expert + 1))
    for matrix_range in sorted(
        single, key=lambda matrix_range: -matrices[matrix_range.index].flops
    ):
        rank = flops.index(min(flops))
        owned[rank].append(matrix_range)
        flops[rank] += matrices[matrix_range.index].flops
    # Matrices of one shape follow each other, because they are orthogonalised together.
    for ranges in owned:
        ranges.sort(
            key=lambda matrix_range: (
                -matrices[matrix_range.index].flops,
                matrices[matrix_range.index].shape,
            )
        )
    return owned


def _divide(
    matrices: Sequence[Matrices], ranges: Sequence[MatrixRange], bucket_bytes: int
) -> Iterator[tuple[MatrixRange, ...]]:
    """Divide the ranges of a rank into buckets."""
    bucket: list[MatrixRange] = []
    num_bytes = 0
    for matrix_range in ranges:
        entry = matrices[matrix_range.index]
        at_once = max(1, bucket_bytes // _bytes_of_matrix(entry))
        for start in range(matrix_range.start, matrix_range.stop, at_once):
            piece = MatrixRange(
                matrix_range.index,
                matrix_range.part,
                start,
                min(start + at_once, matrix_range.stop),
            )
            size = (piece.stop - piece.start) * _bytes_of_matrix(entry)
            if bucket and num_bytes + size > bucket_bytes:
                yield tuple(bucket)
                bucket, num_bytes = [], 0
            bucket.append(piece)
            num_bytes += size
    if bucket:
        yield tuple(bucket)


def _bytes_of_matrix(entry: Matrices) -> int:
    return entry.shape[0] * entry.shape[1] * entry.itemsize
