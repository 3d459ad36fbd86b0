"""List, gather and write the tensors of a model with pipeline stages; a rank has one of the stages.

Every rank lists all tensors of the model, in the same order. In place of a tensor of another stage
the list has a tensor on the meta device with the same shape and dtype.

    save_pretrained   each stage writes files of its own tensors, and no tensor leaves its stage
                      (`assign_groups`, `list_files_of_stage`)
    hub_tensors       the ranks of a stage gather a slab: a part of a tensor, at most `max_bytes`.
                      Each of these ranks sends the slab to the ranks that have the same position in
                      the other stages, its column (`iterate_slabs_for_all_stages`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.checkpoints.hub.gather import Change, iterate_slabs_for_all, list_slabs
from hf_moe_ep.checkpoints.hub.layout import list_distinct_tensors
from hf_moe_ep.checkpoints.hub.write import StageFiles, TensorGroup
from hf_moe_ep.pipeline.stage import Stage
from hf_moe_ep.ranks.all_ranks import gather, this_rank
from hf_moe_ep.ranks.boxes import Box, get_box_sizes
from hf_moe_ep.ranks.mesh import Stages
from hf_moe_ep.state import ModelState

Value = TypeVar("Value")


def gather_from_stages(own: Value, state: ModelState) -> list[Value]:
    """Gather a value of each stage, in the order of the stages; every rank calls this."""
    if state.stage is None:
        return [own]
    assert state.meshes is not None and state.meshes.stages is not None
    return gather(own, state.meshes.stages.column.get_group())


def list_tensors_of_model(
    model: Any, state: ModelState, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the whole model by name, without tied copies.

    Tensors with a name in `without` are left out.
    """
    own = list_distinct_tensors(model, without)
    stage: Stage | None = state.stage
    if stage is None:
        return own
    return {
        name: own[name]
        if name in own and stage.index == tensor.stage
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stage.tensors.items()
        if name not in without
    }


def assign_groups(groups: list[TensorGroup], state: ModelState) -> list[TensorGroup]:
    """Assign each group to the stage that holds its parameters, and sort the groups by stage."""
    stage: Stage | None = state.stage
    if stage is None:
        return groups
    assigned = []
    for group in groups:
        owners = {stage.tensors[name].stage for name in group.names}
        assert len(owners) == 1, f"{group.names} of several stages fill one checkpoint tensor"
        assigned.append(replace(group, stage=owners.pop()))
    return sorted(assigned, key=lambda group: group.stage)


def list_files_of_stage(
    files: list[list[TensorGroup]], num_files: int, state: ModelState
) -> StageFiles | None:
    """Return the files that this rank's stage writes; None for a model without stages.

    Stage 0 also writes the files of extra tensors, which are numbered after `files`.
    """
    stage: Stage | None = state.stage
    if stage is None:
        return None
    numbers: list[list[int]] = [[] for _ in range(stage.size)]
    for number, groups in enumerate(files):
        numbers[groups[0].stage].append(number)
    numbers[0] += range(len(files), num_files)
    return StageFiles(numbers[stage.index], max(map(len, numbers)))


def is_writer(state: ModelState) -> bool:
    """Return True on the first rank of each stage, and without stages on rank 0."""
    return this_rank() == (0 if state.meshes is None else state.meshes.first_rank)


def check_folder_is_shared(folder: Path, configs: Path, state: ModelState) -> None:
    """Raise ValueError if a rank that writes does not see what rank 0 has written to the folder.

    `configs` is a subfolder that rank 0 has created.
    """
    if is_writer(state) and not (folder / configs.name).is_dir():
        raise ValueError(
            f"rank {this_rank()} writes the tensors of pipeline stage {state.stage.index} of "
            f"{state.stage.size} to {folder}, but does not see there what rank 0 has written; pass "
            f"the path of one folder that all nodes share"
        )


def iterate_slabs_for_all_stages(
    name: str,
    tensor: Tensor,
    state: ModelState,
    dtype: torch.dtype,
    change: Change,
    max_bytes: int,
    slots_E: Tensor | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield (box, values) of a parameter on the compute device of every rank.

    `gather.iterate_slabs_for_all` describes the arguments.
    """
    stage: Stage | None = state.stage
    if stage is None:
        yield from iterate_slabs_for_all(tensor, dtype, change, max_bytes, slots_E)
        return
    meshes = state.meshes
    assert meshes is not None and meshes.stages is not None
    stages: Stages = meshes.stages
    owner = stage.tensors[name].stage
    source, group = stages.find_rank_in(owner), stages.column.get_group()
    if stage.index == owner:
        for box, values in iterate_slabs_for_all(tensor, dtype, change, max_bytes, slots_E):
            values = values.contiguous()
            dist.broadcast(values, source, group=group)
            yield box, values
        return
    for box in list_slabs(tensor, dtype, max_bytes):
        values = torch.empty(get_box_sizes(box), dtype=dtype, device=meshes.device)
        dist.broadcast(values, source, group=group)
        yield box, values
