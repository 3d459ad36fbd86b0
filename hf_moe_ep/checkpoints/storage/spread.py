"""How tensors are spread over ranks: which rank writes which part, and where a part can be read.

A tensor lies on a grid of ranks. Each axis of the grid cuts a dim of what later axes left of it, or
cuts nothing, and then its ranks are replicas of each other. 8 rows on 8 ranks, cut by the second
axis of a grid [2, 4], `cuts` (None, 0):

                   rows 0, 1   2, 3   4, 5   6, 7
    replica 0      rank 0      1      2      3
    replica 1      rank 4      5      6      7

One replica writes a tensor: that with least to write so far. All of this follows from the layout,
which every rank knows, so nobody has to be asked; the file of a state keeps it for the reader.
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
    """A grid of all ranks, and what its axes cut.

    Attributes:
        grid: sizes of its axes.
        ranks: row-major.
        cuts: of each axis the dim of the tensor that it cuts, None for none.
    """

    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[int | None, ...]

    @staticmethod
    def of(name: str, tensor: Tensor, world: int) -> Spread:
        """Find how a tensor lies on `world` ranks; one that is no DTensor is whole on each.

        Raises:
            ValueError: it lies on some of the ranks only, or in sums that were not added up.
        """
        if not isinstance(tensor, DTensor):
            return Spread((world,), tuple(range(world)), (None,))
        mesh = tensor.device_mesh
        if mesh.size() != world:
            raise ValueError(
                f"{name} lies on {mesh.size()} of {world} ranks, and what the others hold of it "
                f"nobody knows here; shard the model with apply_ep_fsdp2 or Accelerate"
            )
        cuts: list[int | None] = []
        for placement in tensor.placements:
            dim: int | None = getattr(placement, "dim", None)
            if dim is None and not isinstance(placement, Replicate):
                raise ValueError(f"{name} is {placement} over ranks, which is no part of it")
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
        """Tell whether a rank is one of those of a replica."""
        place, coordinate = self.ranks.index(rank), []
        for size in reversed(self.grid):
            place, at = divmod(place, size)
            coordinate.append(at)
        return self._replica(coordinate[::-1]) == replica

    def boxes(self, shape: Iterable[int], replica: int) -> Iterator[tuple[int, Box]]:
        """Yield (rank, its part) of a tensor of `shape`, of all ranks of a replica."""
        shape = tuple(shape)
        for rank, coordinate in zip(self.ranks, product(*map(range, self.grid)), strict=True):
            if self._replica(coordinate) == replica:
                yield rank, cut_box(shape, self.grid, self.cuts, coordinate)

    def _replica(self, coordinate: Iterable[int]) -> int:
        """Number the replicas, of the last axis that cuts nothing the fastest."""
        number = 0
        for at, size, dim in zip(coordinate, self.grid, self.cuts, strict=True):
            number = number * size + at if dim is None else number
        return number

    def holders(self, shape: Iterable[int], replica: int, box: Box) -> frozenset[int]:
        """Find the ranks of a replica that hold some of `box` of a tensor of `shape`."""
        found = (rank for rank, theirs in self.boxes(shape, replica) if overlap(theirs, box))
        return frozenset(found)


def find_spreads(tensors: Mapping[str, Tensor], world: int) -> dict[str, Spread]:
    """Find how each tensor lies; those that lie alike share one object, which may be large.

    Raises:
        ValueError: as `Spread.of`.
    """
    known: dict[Any, Spread] = {}
    alike: dict[Spread, Spread] = {}
    found: dict[str, Spread] = {}
    for name, tensor in tensors.items():
        key: Any = None
        if isinstance(tensor, DTensor):
            key = (id(tensor.device_mesh), tensor.placements)
        if key not in known:
            spread = Spread.of(name, tensor, world)
            known[key] = alike.setdefault(spread, spread)
        found[name] = known[key]
    return found


def choose_replicas(tensors: Mapping[str, tuple[Spread, int]]) -> dict[str, int]:
    """Choose which replica writes each tensor, (spread, bytes); every rank chooses the same.

    The largest first, each to the replica with least to write, of as many replicas.
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
