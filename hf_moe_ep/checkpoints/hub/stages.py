"""The tensors of a model with pipeline stages, of which each rank holds those of its stage.

Every rank lists all tensors of the model, in the same order. A tensor of another stage is a tensor
on the meta device with the shape and the dtype of the whole tensor. Its values are sent by the
ranks that hold it:

    to rank 0 (`slabs_of_stages`)           the first rank of the stage gathers a slab as without
                                            stages, and sends it to rank 0
    to all ranks (`slabs_for_all_stages`)   the ranks of the stage gather a slab, and each one sends
                                            it to the ranks of its column
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.checkpoints.hub.gather import Change, list_slabs, slabs_for_all, slabs_of
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors
from hf_moe_ep.etp import slabs_in_stock_shape
from hf_moe_ep.pipeline.stage import Stage
from hf_moe_ep.ranks.boxes import Box, box_sizes
from hf_moe_ep.ranks.mesh import Stages
from hf_moe_ep.ranks.neighbours import receive_boxes, send_boxes
from hf_moe_ep.ranks.together import is_first, this_rank
from hf_moe_ep.state import ModelState


def tensors_of_model(
    model: Any, state: ModelState, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the whole model by name, without tied copies.

    The names in `without` are left out.
    """
    own = distinct_tensors(model, without)
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


def slabs_of_stages(
    name: str, tensor: Tensor, state: ModelState, apart: int | None
) -> Iterator[tuple[Box, Tensor | None]]:
    """Yield (box, values) of a parameter in host memory of rank 0; every rank iterates to the end.

    On other ranks the values are None, or nothing is yielded. Boxes and values have stock dims, of
    which this rank may hold `apart` as two dims (`etp.py`).
    """
    stage: Stage | None = state.stage
    holder = 0 if stage is None else stage.tensors[name].stage
    if stage is None or (holder == 0 and stage.is_first):
        yield from slabs_in_stock_shape(slabs_of(tensor), apart)
        return
    meshes = state.meshes
    assert meshes is not None and meshes.stages is not None
    group, device = meshes.stages.column.get_group(), meshes.device
    if stage.index == holder:
        parts = slabs_in_stock_shape(slabs_of(tensor), apart)
        if this_rank() == meshes.first_rank:
            send_boxes(parts, 0, group, device)
        else:
            for _ in parts:
                pass
    elif is_first():
        for box, values in receive_boxes(meshes.stages.first_ranks[holder], group, device):
            yield box, values.cpu()


def slabs_for_all_stages(
    name: str,
    tensor: Tensor,
    state: ModelState,
    dtype: torch.dtype,
    change: Change,
    max_bytes: int,
    slots_E: Tensor | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield (box, values) of a parameter on the compute device of every rank.

    The arguments are those of `gather.slabs_for_all`.
    """
    stage: Stage | None = state.stage
    if stage is None:
        yield from slabs_for_all(tensor, dtype, change, max_bytes, slots_E)
        return
    meshes = state.meshes
    assert meshes is not None and meshes.stages is not None
    stages: Stages = meshes.stages
    holder = stage.tensors[name].stage
    source, group = stages.rank_in(holder), stages.column.get_group()
    if stage.index == holder:
        for box, values in slabs_for_all(tensor, dtype, change, max_bytes, slots_E):
            values = values.contiguous()
            dist.broadcast(values, source, group=group)
            yield box, values
        return
    for box in list_slabs(tensor, dtype, max_bytes):
        values = torch.empty(box_sizes(box), dtype=dtype, device=meshes.device)
        dist.broadcast(values, source, group=group)
        yield box, values
