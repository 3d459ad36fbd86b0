"""How a tensor is sharded over ranks: which rank writes which box, and where a box can be read.

A tensor is sharded over a grid of ranks. Each axis of the grid cuts one dim of the shards that the
later axes leave, or cuts nothing; the ranks along an axis that cuts nothing are replicas. 8 rows on
8 ranks, cut by the second axis of a grid [2, 4], `cuts` (None, 0):

                   rows 0, 1   2, 3   4, 5   6, 7
    replica 0      rank 0      1      2      3
    replica 1      rank 4      5      6      7

One replica writes a tensor: the one with the fewest bytes to write so far. All of this follows from
the layout, which every rank knows, so no rank has to ask another. A training checkpoint stores it
for the reader.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.checkpoints.storage.boxes import Box, cut_box, overlap


@dataclass(frozen=True)
class Spread:
    """The sharding of a tensor over a grid of all ranks.

    Attributes:
        grid: the sizes of the grid's axes.
        ranks: the ranks in the grid, row-major.
        cuts: for each axis the dim of the tensor that it cuts; None for an axis of replicas.
    """

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[int | None, ...]

    @staticmethod
    def of(name: str, tensor: Tensor, world: int) -> Spread:
        """Return the sharding of a tensor on `world` ranks; a plain tensor is whole on each rank.

        Raises:
            ValueError: only some of the ranks hold the tensor, or its values are partial sums.
        """
        if not isinstance(tensor, DTensor):
            return Spread((world,), tuple(range(world)), (None,))
        mesh = tensor.device_mesh
        if mesh.size() != world:
            raise ValueError(
                f"{name} is sharded over {mesh.size()} of {world} ranks, and this rank does not "
                f"know what the other ranks hold; shard the model with apply_ep_fsdp2 or Accelerate"
            )
        cuts: list[int | None] = []
        for placement in tensor.placements:
            dim: int | None = getattr(placement, "dim", None)
            if dim is None and not isinstance(placement, Replicate):
                raise ValueError(f"{name} is {placement} over ranks, which is not a shard of it")
            cuts.append(dim)
        return Spread(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(cuts))

    def to_json(self) -> dict[str, Any]:
        return {"grid": list(self.grid), "ranks": list(self.ranks), "cuts": list(self.cuts)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Spread:
        return Spread(tuple(content["grid"]), tuple(content["ranks"]), tuple(content["cuts"]))

    @property
    def num_replicas(self) -> int:
        return math.prod(
            size for size, dim in zip(self.grid, self.cuts, strict=True) if dim is None
        )

    def is_writer(self, rank: int, replica: int) -> bool:
        """Tell whether a rank belongs to a replica."""
        position, coordinate = self.ranks.index(rank), []
        for size in reversed(self.grid):
            position, at = divmod(position, size)
            coordinate.append(at)
        return self._replica_of(coordinate[::-1]) == replica

    def boxes(self, shape: Iterable[int], replica: int) -> Iterator[tuple[int, Box]]:
        """Yield (rank, its box) for all ranks of a replica; `shape` is that of the tensor."""
        shape = tuple(shape)
        for rank, coordinate in zip(self.ranks, product(*map(range, self.grid)), strict=True):
            if self._replica_of(coordinate) == replica:
                yield rank, cut_box(shape, self.grid, self.cuts, coordinate)

    def _replica_of(self, coordinate: Iterable[int]) -> int:
        """Number the replicas row-major over the axes that cut nothing."""
        number = 0
        for at, size, dim in zip(coordinate, self.grid, self.cuts, strict=True):
            number = number * size + at if dim is None else number
        return number

    def holders(self, shape: Iterable[int], replica: int, box: Box) -> frozenset[int]:
        """Return the ranks of a replica that hold elements of `box`."""
        found = (rank for rank, theirs in self.boxes(shape, replica) if overlap(theirs, box))
        return frozenset(found)


def choose_writers(tensors: Mapping[str, Tensor], world: int) -> dict[str, tuple[Spread, int]]:
    """Return the sharding of each tensor and the replica that writes it, equal on every rank.

    Tensors with the same sharding share one object, which is large on many ranks.

    Raises:
        ValueError: as `Spread.of`.
    """
    known: dict[Any, Spread] = {}
    equal: dict[Spread, Spread] = {}
    spreads: dict[str, Spread] = {}
    for name, tensor in tensors.items():
        key: Any = None
        if isinstance(tensor, DTensor):
            key = (id(tensor.device_mesh), tensor.placements)
        if key not in known:
            spread = Spread.of(name, tensor, world)
            known[key] = equal.setdefault(spread, spread)
        spreads[name] = known[key]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    replicas = choose_replicas({name: (spreads[name], sizes[name]) for name in tensors})
    return {name: (spreads[name], replicas[name]) for name in tensors}


def choose_replicas(tensors: Mapping[str, tuple[Spread, int]]) -> dict[str, int]:
    """Choose which replica writes each tensor, given as (sharding, bytes).

    Tensors are assigned in the order of their sizes, the largest first, to the replica with the
    fewest bytes so far. Tensors with another number of replicas are balanced on their own.
    """
    chosen: dict[str, int] = {}
    loads: dict[int, list[tuple[int, int]]] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name][1], name)):
        spread, size = tensors[name]
        number = spread.num_replicas
        load = loads.setdefault(number, [(0, replica) for replica in range(number)])
        so_far, chosen[name] = load[0]
        heapq.heapreplace(load, (so_far + size, chosen[name]))
    return chosen
