"""Describe how a tensor is sharded, which ranks write it, and which ranks hold a box of it.

A box is one index range per dim (`ranks/boxes.py`). `Spread` describes the sharding over a grid of
ranks. Each axis of the grid cuts one dim of a tensor, or none. The last axis cuts first, and each
earlier axis cuts the resulting shards. The ranks along an axis that cuts no dim are replicas. In
this example the grid is [2, 4] and `cuts` is (None, 0): the second axis cuts the 8 rows.

                   rows 0, 1   2, 3   4, 5   6, 7
    replica 0      rank 0      1      2      3
    replica 1      rank 4      5      6      7

A tensor with a `split_dim` (`etp.py`) has the rows of gate and then the rows of up in this dim. An
axis cuts both halves of the dim, so a rank has two boxes.

One replica writes a tensor: `choose_writers` chooses the replica with the fewest bytes so far.
Every rank knows the layout and computes the same result, so no communication is needed. A training
checkpoint stores the sharding for the ranks that load it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.ranks.boxes import Box, cut_box, intersect_boxes


@dataclass(frozen=True)
class Spread:
    """The sharding of a tensor over a grid of all ranks, or of the ranks of a pipeline stage.

    Attributes:
        grid: the sizes of the grid's axes.
        ranks: the ranks in the grid, row-major.
        cuts: for each axis, the dim of the tensor that it cuts; None for an axis of replicas.
        split_dim: the dim that has two halves, which are both cut; None if there is no such dim.
    """

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[int | None, ...]
    split_dim: int | None = None

    @staticmethod
    def of(name: str, tensor: Tensor, ranks: Sequence[int], split_dim: int | None = None) -> Spread:
        """Return the sharding of a tensor on `ranks`; plain tensors are replicated.

        Args:
            split_dim: the dim of the tensor in files that the model splits into (2, half).

        Raises:
            ValueError: only some of the ranks hold the tensor, or its values are partial sums.
        """
        if not isinstance(tensor, DTensor):
            return Spread((len(ranks),), tuple(ranks), (None,))
        mesh = tensor.device_mesh
        if mesh.size() != len(ranks):
            raise ValueError(
                f"{name} is sharded over {mesh.size()} of {len(ranks)} ranks, and this rank does "
                f"not know what the others hold; shard the model with apply_ep_fsdp2 or Accelerate"
            )
        cuts: list[int | None] = []
        for placement in tensor.placements:
            dim: int | None = getattr(placement, "dim", None)
            if dim is None and not isinstance(placement, Replicate):
                raise ValueError(
                    f"{name} has the placement {placement}; a checkpoint can hold Shard and "
                    f"Replicate"
                )
            if dim is not None and split_dim is not None and dim > split_dim:
                dim -= 1  # the model has one more dim before `dim`
            cuts.append(dim)
        ranks = tuple(mesh.mesh.flatten().tolist())
        return Spread(tuple(mesh.shape), ranks, tuple(cuts), split_dim)

    def to_json(self) -> dict[str, Any]:
        """Convert the sharding to JSON values; the files name `split_dim` "apart"."""
        content = {"grid": list(self.grid), "ranks": list(self.ranks), "cuts": list(self.cuts)}
        return content if self.split_dim is None else {**content, "apart": self.split_dim}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Spread:
        grid, ranks, cuts = (tuple(content[name]) for name in ("grid", "ranks", "cuts"))
        return Spread(grid, ranks, cuts, content.get("apart"))

    @property
    def num_replicas(self) -> int:
        return math.prod(
            size for size, dim in zip(self.grid, self.cuts, strict=True) if dim is None
        )

    def is_writer(self, rank: int, replica: int) -> bool:
        """Return True if a rank belongs to the replica that writes."""
        position, coordinate = self.ranks.index(rank), []
        for size in reversed(self.grid):
            position, index = divmod(position, size)
            coordinate.append(index)
        return self._find_replica(coordinate[::-1]) == replica

    def boxes(self, shape: Iterable[int], replica: int) -> Iterator[tuple[int, Box]]:
        """Yield (rank, box of the rank) for a tensor of shape `shape`, for all ranks of a replica.

        If the tensor has a `split_dim`, the boxes of both halves are yielded for each rank.
        """
        sizes, half = list(shape), 0
        if self.split_dim is not None:
            half = sizes[self.split_dim] = sizes[self.split_dim] // 2
        for rank, coordinate in zip(self.ranks, product(*map(range, self.grid)), strict=True):
            if self._find_replica(coordinate) != replica:
                continue
            box = cut_box(sizes, self.grid, self.cuts, coordinate)
            yield rank, box
            if self.split_dim is not None:
                start, stop = box[self.split_dim]
                second = (start + half, stop + half)
                yield rank, (*box[: self.split_dim], second, *box[self.split_dim + 1 :])

    def _find_replica(self, coordinate: Iterable[int]) -> int:
        """Return the number of a rank's replica, row-major over the axes that cut no dim."""
        number = 0
        for index, size, dim in zip(coordinate, self.grid, self.cuts, strict=True):
            number = number * size + index if dim is None else number
        return number

    def holders(self, shape: Iterable[int], replica: int, box: Box) -> frozenset[int]:
        """Return the ranks of a replica that hold elements of `box`."""
        boxes = self.boxes(shape, replica)
        return frozenset(rank for rank, rank_box in boxes if intersect_boxes(rank_box, box))


def choose_writers(
    tensors: Mapping[str, Tensor], ranks: Sequence[int], split_dims: Mapping[str, int]
) -> dict[str, tuple[Spread, int]]:
    """Return the sharding of each tensor and the replica that writes it, the same on all `ranks`.

    Tensors with the same sharding share one `Spread`, because a `Spread` lists all ranks.

    Args:
        split_dims: for each tensor that the model splits, the argument `split_dim` of `Spread.of`.

    Raises:
        ValueError: as in `Spread.of`.
    """
    known: dict[Any, Spread] = {}
    equal: dict[Spread, Spread] = {}
    spreads: dict[str, Spread] = {}
    for name, tensor in tensors.items():
        key: Any = None
        if isinstance(tensor, DTensor):
            key = (id(tensor.device_mesh), tensor.placements, split_dims.get(name))
        if key not in known:
            spread = Spread.of(name, tensor, ranks, split_dims.get(name))
            known[key] = equal.setdefault(spread, spread)
        spreads[name] = known[key]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    replicas = choose_replicas({name: (spreads[name], sizes[name]) for name in tensors})
    return {name: (spreads[name], replicas[name]) for name in tensors}


def choose_replicas(tensors: Mapping[str, tuple[Spread, int]]) -> dict[str, int]:
    """Choose which replica writes each tensor; `tensors` has (sharding, bytes) by name.

    Tensors are assigned in the order of their sizes, the largest first, to the replica with the
    fewest bytes so far. Tensors with different numbers of replicas are balanced separately.
    """
    chosen: dict[str, int] = {}
    loads: dict[int, list[tuple[int, int]]] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name][1], name)):
        spread, size = tensors[name]
        num_replicas = spread.num_replicas
        load = loads.setdefault(num_replicas, [(0, replica) for replica in range(num_replicas)])
        num_bytes, chosen[name] = load[0]
        heapq.heapreplace(load, (num_bytes + size, chosen[name]))
    return chosen
