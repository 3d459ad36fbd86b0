"""Let each rank plan its own writes when torch.distributed.checkpoint (DCP) saves.

With DCP's own planner every rank sends a list of all its shards to rank 0. Rank 0 merges the lists,
validates the result and sends each rank its part: 200,000 items for 3,111 tensors on 64 ranks, at
every save. But the layout determines which rank writes which shards (`spread.py`), so with
`SpreadPlanner` a rank sends only a hash of its layout:

    rank 0 receives   a hash of each rank's names, shapes, dtypes and shardings; they must be equal
    rank 0 writes     `.metadata`, with the shards of all ranks
    each rank writes  the shards that `choose_writers` of `spread.py` assigns to it

The files are in DCP's format. After writing, each rank sends a list of its written shards to rank
0, as with DCP's planner. With pipeline stages only some of the ranks hold a tensor, and DCP plans
the whole save.

With etp_size > 1 a model splits a dim of some tensors (`etp.py`), and a shard of such a tensor is
two boxes (index ranges, `ranks/boxes.py`) of the stock tensor. `SpreadPlanner` writes both boxes,
and `SplitLoadPlanner` reads both.

`DefaultSavePlanner(enable_plan_caching=True)` would not help. Its cache has one entry per class of
planner, and Accelerate saves a model and an optimizer in turn, so the entry never fits. On 4 gloo
ranks, the plans for 3,111 tensors of a model and 6,222 tensors of its optimizer take 5.0 to 5.6 s
with DCP's planner, 5.7 to 7.0 s with plan caching, and 1.9 to 2.2 s with this planner.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, state_dict_loader
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hf_moe_ep.checkpoints.storage.spread import Spread, choose_writers
from hf_moe_ep.etp import get_stock_shape, list_stock_parts
from hf_moe_ep.ranks.all_ranks import this_rank, world_size
from hf_moe_ep.ranks.boxes import get_box_sizes, get_local_tensor
from hf_moe_ep.upstream.replaced import replaced


class SpreadPlanner(DefaultSavePlanner):
    """Plans a save of tensors that are sharded over all ranks, without exchanging plans.

    Args:
        split_dims: the result of `etp.map_names_to_split_dims`.
        has_stages: True if DCP must plan the save, because each pipeline stage has its own tensors.
    """

    _writers: dict[str, tuple[Spread, int]] | None = None

    def __init__(
        self,
        *args: Any,
        split_dims: Mapping[str, int] = MappingProxyType({}),
        has_stages: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._has_stages = has_stages
        self._split_dims_by_name = split_dims
        self._split_dims_by_key: dict[str, int] = {}

    def create_local_plan(self) -> SavePlan:
        """Store this rank's plan; return an empty plan with the hash that rank 0 compares.

        With pipeline stages, return this rank's plan; DCP merges all plans.
        """
        tensors = {n: value for n, value in self.state_dict.items() if isinstance(value, Tensor)}
        self._split_dims_by_key = _find_split_dims(tensors, self._split_dims_by_name)
        if self._has_stages:
            self.plan = self._plan_writes(self.state_dict)
            return self.plan
        self._writers = choose_writers(tensors, range(world_size()), self._split_dims_by_key)
        # Rank 0, the coordinator, writes all entries that are not tensors.
        to_write = {
            name: value
            for name, value in self.state_dict.items()
            if (self._writes(name, value) if name in tensors else self.is_coordinator)
        }
        self.plan = self._plan_writes(to_write)
        return SavePlan([], planner_data=self._hash_layout(tensors))

    def _plan_writes(self, entries: dict[str, Any]) -> SavePlan:
        """Plan the writes of this rank; DCP plans all entries except the split tensors."""
        unsplit = {
            name: value for name, value in entries.items() if name not in self._split_dims_by_key
        }
        plan = create_default_local_save_plan(unsplit, self.is_coordinator)
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(view), self._get_stock_size(name)
                ),
            )
            for name in entries.keys() & self._split_dims_by_key.keys()
            for chunk, view in _list_parts(entries[name], self._split_dims_by_key[name])
        ]
        return replace(plan, items=[*plan.items, *items], planner_data=self.mappings)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, or the box of a split tensor, that a write item of DCP names."""
        if index.fqn not in self._split_dims_by_key:
            return super().lookup_object(index)
        return _find_part(
            self.state_dict[index.fqn], self._split_dims_by_key[index.fqn], index
        ).contiguous()

    def _get_stock_size(self, name: str) -> torch.Size:
        return torch.Size(
            get_stock_shape(self.state_dict[name].shape, self._split_dims_by_key.get(name))
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Make the metadata on rank 0.

        Raises:
            ValueError: a rank has other tensors than rank 0.
        """
        # A rank that planned its own writes sent a hash, a str. With stages it sent a dict.
        digests = [plan.planner_data for plan in all_plans]
        if not any(isinstance(digest, str) for digest in digests):
            return super().create_global_plan(all_plans)
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others or self._writers is None:
            raise ValueError(
                f"ranks {others} have other tensors to save than rank 0, or shard them in another "
                f"way: every rank must shard the same model and take the same steps"
            )
        entries: dict[str, Any] = {}
        shared: dict[Any, list[ChunkStorageMetadata]] = {}
        for name, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                entries[name] = BytesStorageMetadata()
                continue
            spread, replica = self._writers[name]
            size = self._get_stock_size(name)
            key = (id(spread), replica, size)
            if key not in shared:
                shared[key] = _list_chunks(spread, replica, size)
            properties = TensorProperties.create_from_tensor(get_local_tensor(value))
            entries[name] = TensorStorageMetadata(properties, size, shared[key])
        self.metadata = Metadata(entries, planner_data=self.mappings)
        self.global_plan = [SavePlan([]) for _ in all_plans]
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Add this rank's writes to the plan that rank 0 sent."""
        if self._writers is not None:
            new_plan = replace(new_plan, items=self.plan.items)
        self.plan = new_plan
        return new_plan

    def _writes(self, name: str, tensor: Tensor) -> bool:
        """Return True if this rank writes a shard of a tensor."""
        assert self._writers is not None
        spread, replica = self._writers[name]
        return spread.is_writer(this_rank(), replica) and get_local_tensor(tensor).numel() > 0

    def _hash_layout(self, tensors: dict[str, Tensor]) -> str:
        assert self._writers is not None
        texts: dict[int, str] = {}  # the text of each spread, by its id
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            spread, _ = self._writers[name]
            if id(spread) not in texts:
                texts[id(spread)] = repr(spread)
            text = f"{name} {tuple(tensor.shape)} {tensor.dtype} {texts[id(spread)]} "
            digest.update(text.encode())
        return digest.hexdigest()


def _list_chunks(spread: Spread, replica: int, shape: torch.Size) -> list[ChunkStorageMetadata]:
    """List the boxes of all ranks in DCP's form; empty boxes are left out."""
    return [
        ChunkStorageMetadata(
            offsets=torch.Size(start for start, _ in box), sizes=torch.Size(get_box_sizes(box))
        )
        for _, box in spread.boxes(shape, replica)
        if math.prod(get_box_sizes(box))
    ]


class SplitLoadPlanner(DefaultLoadPlanner):
    """Loads each shard of a split tensor from two boxes of the stock tensor.

    If the files have no state of a parameter that an optimizer trains, the planner removes this
    parameter's state from the state dict: the parameter had no gradient before the save, such as
    those of a vision tower in a training on text alone. DCP would raise "Missing key".
    `integrations/optimizer_states.py` checks that the saved run trained the parameter.

    Args:
        split_dims: as in `SpreadPlanner`.
    """

    def __init__(self, *args: Any, split_dims: Mapping[str, int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._split_dims_by_name = split_dims
        self._split_dims_by_key: dict[str, int] = {}

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank.

        Raises:
            ValueError: a split tensor is missing in the files, or has another shape.
        """
        assert self.metadata is not None
        self._remove_states_without_files(self.metadata)
        tensors = {n: value for n, value in self.state_dict.items() if isinstance(value, Tensor)}
        self._split_dims_by_key = _find_split_dims(tensors, self._split_dims_by_name)
        if not self._split_dims_by_key:
            return super().create_local_plan()
        # The base class's method would plan the whole state dict, so it is not called.
        unsplit = {
            name: x for name, x in self.state_dict.items() if name not in self._split_dims_by_key
        }
        plan = create_default_local_load_plan(unsplit, self.metadata, not self.allow_partial_load)
        items = []
        for name, dim in self._split_dims_by_key.items():
            stored = self.metadata.state_dict_metadata.get(name)
            size = torch.Size(get_stock_shape(tensors[name].shape, dim))
            if not isinstance(stored, TensorStorageMetadata) or stored.size != size:
                found = "missing" if stored is None else f"{getattr(stored, 'size', stored)}"
                raise ValueError(f"{name} is {found} in the checkpoint, but {size} in the model")
            chunks = [chunk for chunk, _ in _list_parts(tensors[name], dim)]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return replace(plan, items=[*plan.items, *items])

    def _remove_states_without_files(self, metadata: Metadata) -> None:
        """Remove the state of each parameter of which the files have no state."""
        saved = {_get_parameter_name(key) for key in metadata.state_dict_metadata}
        for key in list(self.state_dict):
            name = _get_parameter_name(key)
            if name is not None and name not in saved:
                del self.state_dict[key]
                # DCP fills this nested state dict, which Accelerate then loads.
                self.original_state_dict["optimizer"]["state"].pop(name, None)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor, or the part of a split tensor, that a read item of DCP fills."""
        if index.fqn not in self._split_dims_by_key:
            return super().lookup_tensor(index)
        return _find_part(self.state_dict[index.fqn], self._split_dims_by_key[index.fqn], index)


def _find_split_dims(
    tensors: Mapping[str, Tensor], dims_by_name: Mapping[str, int]
) -> dict[str, int]:
    """Map keys of Accelerate's state dicts to the stock dims that the model splits.

    The keys of a parameter NAME are model.NAME, optimizer.state.NAME.exp_avg and so on.
    `dims_by_name` has the split dim of the parameter under NAME.
    """
    split_dims = {}
    for key, tensor in tensors.items():
        name = _get_parameter_name(key) or key.removeprefix("model.")
        if name in dims_by_name and tensor.ndim:
            split_dims[key] = dims_by_name[name]
    return split_dims


def _get_parameter_name(key: str) -> str | None:
    """Return NAME if a key has the form optimizer.state.NAME.exp_avg, otherwise None."""
    prefix = "optimizer.state."
    return key.removeprefix(prefix).rpartition(".")[0] if key.startswith(prefix) else None


def _list_parts(tensor: Tensor, split_dim: int) -> list[tuple[ChunkStorageMetadata, Tensor]]:
    """List (box in DCP's form, values) of this rank's shard; empty boxes are left out."""
    return [
        (
            ChunkStorageMetadata(
                offsets=torch.Size(start for start, _ in box), sizes=torch.Size(get_box_sizes(box))
            ),
            view.detach(),
        )
        for box, view in list_stock_parts(tensor, split_dim)
        if view.numel()
    ]


def _find_part(tensor: Tensor, split_dim: int, index: MetadataIndex) -> Tensor:
    """Return the values of this rank's shard in the box that a DCP item names by its offset."""
    parts = _list_parts(tensor, split_dim)
    return next(view for chunk, view in parts if chunk.offsets == index.offset)


@contextmanager
def use_spread_planner(
    split_dims: Mapping[str, int] = MappingProxyType({}), *, has_stages: bool = False
) -> Iterator[None]:
    """Use `SpreadPlanner` for all saves of this thread inside the block, with these arguments.

    This includes the saves of Accelerate, which creates DCP's planner.
    """
    planner = partial(SpreadPlanner, split_dims=split_dims, has_stages=has_stages)
    with _replace_planner_class(default_planner, "DefaultSavePlanner", planner):
        yield


@contextmanager
def use_split_load_planner(split_dims: Mapping[str, int]) -> Iterator[None]:
    """Use `SplitLoadPlanner` for all loads of this thread inside the block.

    Accelerate before 1.15 passes no planner for an optimizer, so DCP's `load` creates one.
    """
    planner = partial(SplitLoadPlanner, split_dims=split_dims)
    with (
        _replace_planner_class(default_planner, "DefaultLoadPlanner", planner),
        _replace_planner_class(state_dict_loader, "DefaultLoadPlanner", planner),
    ):
        yield


@contextmanager
def _replace_planner_class(module: ModuleType, name: str, planner: Any) -> Iterator[None]:
    """Replace a planner class in a module of DCP inside the block, in this thread only."""
    stock, thread = getattr(module, name), threading.get_ident()

    def create(*args: Any, **kwargs: Any) -> Any:
        is_ours = threading.get_ident() == thread
        return planner(*args, **kwargs) if is_ours else stock(*args, **kwargs)

    with replaced(module, name, create):
        yield
