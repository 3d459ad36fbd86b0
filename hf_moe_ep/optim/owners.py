"""Assign each sharded matrix to one rank, its owner, which orthogonalises the whole matrix.

The ranks of a process group that hold the rows of a matrix send them to the owner of the matrix:

    rank 0   rows 0, 1 of a, b, c, d      all rows of a, b      rows 0, 1 of the results
    rank 1   rows 2, 3 of a, b, c, d      all rows of c, d      rows 2, 3 of the results
                              all-to-all            all-to-all

Experts that are whole on a rank are not sent. If FSDP2 has sharded the rows of the experts of an ep
rank, or if an etp group shares these experts, each rank of the group owns an equal number of them.
All other matrices are assigned in the order of their Newton-Schulz operations, the largest first,
each to the rank that has the fewest operations so far.

The matrices of an owner are divided into buckets: one bucket is sent while the second half of the
previous bucket is orthogonalised. Values are sent in the dtype of Newton-Schulz, bf16. In a group
of g ranks with equal shards, a rank sends (g - 1) / g of the elements of its shards to the owners,
and as an owner it sends the same number of elements back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.optim.matrices import MatrixLayout
from hf_moe_ep.optim.orthogonal import count_flops
from hf_moe_ep.ranks.boxes import get_box_at, get_local_tensor

# The maximum size of the matrices that a rank owns in one bucket, unless a single matrix is larger.
BUCKET_BYTES = 64 * 2**20
# A rank orthogonalises 1 / PIECES of `BUCKET_BYTES` at a time, because Newton-Schulz needs two to
# three times the memory of its matrices.
PIECES = 4


@dataclass(frozen=True)
class MatrixSharding:
    """How the matrices of a parameter are sharded over the ranks of a group.

    Attributes:
        group: the ranks that together have all rows and columns of each matrix; None if this rank
            has whole matrices.
        dim: the sharded dim of [E, rows, columns], 1 or 2.
        bounds: for each rank of the group, the [start, stop) of its shard along `dim`.
        experts: the number E of stacked entries, equal on all ranks of the group.
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
        layout: how the parameter stores the matrices.
        shape: [out, in] of each matrix.
        sharding: how the matrices are sharded, and which rows or columns this rank has.
        steps: the number of Newton-Schulz steps.
        itemsize: the number of bytes of an element in an exchange.
    """

    name: str
    layout: MatrixLayout
    shape: tuple[int, int]
    sharding: MatrixSharding
    steps: int
    itemsize: int

    @property
    def matrix_bytes(self) -> int:
        """The number of bytes of one matrix in an exchange."""
        return self.shape[0] * self.shape[1] * self.itemsize

    @property
    def flops(self) -> int:
        """The number of floating-point operations of Newton-Schulz for one matrix."""
        return count_flops(*self.shape, self.steps)

    def view_block(self, stacked_view: Tensor, part: int) -> Tensor:
        """View this rank's shard of one part, [E, out, in]. One of the last two dims is sharded."""
        layout, sharding = self.layout, self.sharding
        rows = (0, self.shape[0] * layout.parts)
        if sharding.group is not None and sharding.dim == layout.out_dim:
            rows = sharding.bounds[sharding.rank]
        return layout.view_block(stacked_view, *rows, part, self.shape[0])

    def block_lengths(self, part: int) -> list[int]:
        """Return the lengths of all ranks' blocks along the sharded dim."""
        if self.sharding.dim != self.layout.out_dim:
            return [stop - start for start, stop in self.sharding.bounds]
        bounds = [
            self.layout.find_part_bounds(start, stop, part, self.shape[0])
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
        part: the number of the part in the parameter's layout.
        start, stop: the bounds of the experts, counted from the first expert of this rank.
    """

    index: int
    part: int
    start: int
    stop: int

    def divide(self, at_once: int) -> Iterator[MatrixRange]:
        """Yield ranges of at most `at_once` matrices, in order."""
        for start in range(self.start, self.stop, at_once):
            yield replace(self, start=start, stop=min(start + at_once, self.stop))


@dataclass(frozen=True)
class Bucket:
    """The matrices of one exchange. Rank r of `group` owns the matrices in `ranges[r]`."""

    group: dist.ProcessGroup
    ranges: tuple[tuple[MatrixRange, ...], ...]


def find_sharding(tensor: Tensor, layout: MatrixLayout) -> MatrixSharding:
    """Find how the matrices of a parameter are sharded over the ranks of a group.

    Raises:
        ValueError: two axes of a mesh shard the rows or columns of the matrices.
    """
    first_dim = 0 if layout.stacked else 1  # dim 0 of `tensor` is this dim of `stacked_view`
    experts = layout.stacked_view(get_local_tensor(tensor)).shape[0]
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
        bounds.append(get_box_at(tensor, at)[dim])
    sharded_dim = layout.matrix_dim(dim + first_dim)
    return MatrixSharding(mesh.get_group(axis), sharded_dim, tuple(bounds), experts)


def divide_whole_matrices(
    matrices: Sequence[Matrices], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[MatrixRange]:
    """Yield the matrices that are whole on this rank, in ranges of at most `bucket_bytes`."""
    for index, entry in enumerate(matrices):
        if entry.sharding.group is not None:
            continue
        at_once = max(1, bucket_bytes // entry.matrix_bytes)
        for part in range(entry.layout.parts):
            yield from MatrixRange(index, part, 0, entry.sharding.experts).divide(at_once)


def assign_owners(matrices: Sequence[Matrices], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Assign all sharded matrices to owners.

    Returns:
        The buckets in the order in which all ranks must exchange them, equal on all ranks of a
        group.
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
    """Return the ranges that each rank owns, with the largest matrices first."""
    owned: list[list[MatrixRange]] = [[] for _ in range(num_ranks)]
    flops = [0] * num_ranks
    single = []
    for index in indices:
        entry = matrices[index]
        per_rank, parts = entry.sharding.experts // num_ranks, entry.layout.parts
        for number in range(parts):
            # A rank can have all rows of the gate and no row of up. It sends as much as others in
            # each bucket if the owners begin with different parts.
            for rank in range(num_ranks if per_rank else 0):
                start, part = rank * per_rank, (number + rank) % parts
                owned[rank].append(MatrixRange(index, part, start, start + per_rank))
                flops[rank] += per_rank * entry.flops
            for expert in range(per_rank * num_ranks, entry.sharding.experts):
                single.append(MatrixRange(index, number, expert, expert + 1))
    single.sort(key=lambda matrix_range: -matrices[matrix_range.index].flops)
    for matrix_range in single:
        rank = flops.index(min(flops))
        owned[rank].append(matrix_range)
        flops[rank] += matrices[matrix_range.index].flops

    def largest_first(matrix_range: MatrixRange) -> tuple[int, tuple[int, int]]:
        entry = matrices[matrix_range.index]
        return -entry.flops, entry.shape

    # Matrices of one shape must follow each other, because they are orthogonalised together.
    for ranges in owned:
        ranges.sort(key=largest_first)
    return owned


def _divide(
    matrices: Sequence[Matrices], ranges: Sequence[MatrixRange], bucket_bytes: int
) -> Iterator[tuple[MatrixRange, ...]]:
    """Divide the ranges that a rank owns into buckets."""
    bucket: list[MatrixRange] = []
    num_bytes = 0
    for matrix_range in ranges:
        entry = matrices[matrix_range.index]
        at_once = max(1, bucket_bytes // entry.matrix_bytes)
        for piece in matrix_range.divide(at_once):
            size = (piece.stop - piece.start) * entry.matrix_bytes
            if bucket and num_bytes + size > bucket_bytes:
                yield tuple(bucket)
                bucket, num_bytes = [], 0
            bucket.append(piece)
            num_bytes += size
    if bucket:
        yield tuple(bucket)
