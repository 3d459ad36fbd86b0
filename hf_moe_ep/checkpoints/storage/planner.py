"""A save by torch.distributed.checkpoint of which each rank plans its own part, for Accelerate.

DCP's own planner has every rank tell rank 0 all that it holds. Rank 0 makes one plan of all of
them, checks it, and sends each rank its part: of 3,111 tensors on 64 ranks 200,000 items, at every
save. Who writes what follows from the layout (`spread.py`), so here ranks tell a hash of it:

    rank 0 is told    a hash of each rank's names, shapes, dtypes and grids; they must be the same
    rank 0 makes      `.metadata`, with the parts of all ranks; tensors that lie alike share a list
    each rank writes  what `spread.py` says that it does, of replicas that with least to write

Files are those of DCP: whatever read them before reads them now. What ranks have written, they
tell rank 0 as ever. Tensors that lie on some of the ranks only are planned as DCP does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from hf_moe_ep.checkpoints.storage.boxes import local_tensor
from hf_moe_ep.checkpoints.storage.spread import Spread, choose_replicas, find_spreads
from hf_moe_ep.ranks.together import this_rank, world_size


@dataclass(frozen=True)
class _Writers:
    """How tensors lie, and which replica of each is written."""

    spreads: dict[str, Spread]
    replicas: dict[str, int]

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> _Writers:
        spreads = find_spreads(tensors, world_size())
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        of_each = {name: (spread, sizes[name]) for name, spread in spreads.items()}
        return _Writers(spreads, choose_replicas(of_each))

    def has(self, name: str, tensor: Tensor) -> bool:
        """Tell whether this rank writes some of it."""
        writer = self.spreads[name].is_writer(this_rank(), self.replicas[name])
        return writer and local_tensor(tensor).numel() > 0

    def chunks(self, name: str, shape: torch.Size) -> list[ChunkStorageMetadata]:
        """List the parts of a tensor that ranks write."""
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(start for start, _ in box),
                sizes=torch.Size(stop - start for start, stop in box),
            )
            for _, box in self.spreads[name].boxes(shape, self.replicas[name])
            if math.prod(stop - start for start, stop in box)
        ]


class SpreadPlanner(DefaultSavePlanner):
    """Plans a save of tensors that lie on all ranks, without telling anybody."""

    _writers: _Writers | None = None

    def create_local_plan(self) -> SavePlan:
        """Keep this rank's plan, and return what rank 0 is told."""
        tensors = {n: value for n, value in self.state_dict.items() if isinstance(value, Tensor)}
        try:
            self._writers = _Writers.of(tensors)
        except ValueError:  # the same on every rank: meshes are
            return super().create_local_plan()
        mine = {
            name: value
            for name, value in self.state_dict.items()
            if (self._writers.has(name, value) if name in tensors else self.is_coordinator)
        }
        self.plan = create_default_local_save_plan(mine, self.is_coordinator)
        return SavePlan([], planner_data=self._digest(tensors))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Make the metadata; on rank 0.

        Raises:
            ValueError: a rank has other tensors than rank 0.
        """
        # A hash of those who planned for themselves; what DCP's own plan has there is a dict.
        told = [plan.planner_data for plan in all_plans]
        if not any(isinstance(of_rank, str) for of_rank in told):
            return super().create_global_plan(all_plans)
        odd = [rank for rank, of_rank in enumerate(told) if of_rank != told[0]]
        if odd or self._writers is None:
            raise ValueError(
                f"ranks {odd} have other tensors to save than rank 0, or they lie elsewhere: every "
                f"rank must shard the same model and take the same steps"
            )
        found: dict[str, Any] = {}
        alike: dict[Any, list[ChunkStorageMetadata]] = {}
        for name, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                found[name] = BytesStorageMetadata()
                continue
            key = (id(self._writers.spreads[name]), self._writers.replicas[name], value.shape)
            if key not in alike:
                alike[key] = self._writers.chunks(name, value.shape)
            properties = TensorProperties.create_from_tensor(local_tensor(value))
            found[name] = TensorStorageMetadata(properties, value.shape, alike[key])
        self.metadata = Metadata(found, planner_data=self.mappings)
        self.global_plan = [SavePlan([]) for _ in all_plans]
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Put this rank's writes into what rank 0 sent it."""
        if self._writers is not None:
            new_plan = replace(new_plan, items=self.plan.items)
        self.plan = new_plan
        return new_plan

    def _digest(self, tensors: dict[str, Tensor]) -> str:
        assert self._writers is not None
        known: dict[int, str] = {}
        hashed = hashlib.sha256()
        for name, tensor in tensors.items():
            spread = self._writers.spreads[name]
            lies = known.setdefault(id(spread), repr(spread))
            form = f"{name} {tuple(tensor.shape)} {tensor.dtype} {lies} "
            hashed.update(form.encode())
        return hashed.hexdigest()


@contextmanager
def planned_by_each() -> Iterator[None]:
    """Let Accelerate, which makes DCP's planner at each save, make ours inside the block."""
    stock = default_planner.DefaultSavePlanner
    setattr(default_planner, "DefaultSavePlanner", SpreadPlanner)  # noqa: B010
    try:
        yield
    finally:
        setattr(default_planner, "DefaultSavePlanner", stock)  # noqa: B010
