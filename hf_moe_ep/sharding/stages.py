"""Leave each rank the part of the model that its pipeline stage holds, before it is sharded.

`cut_into_stages` sends the values of rank 0 to the first rank of each stage, where sharding takes
them (`values.py`), and removes everything that belongs to other stages (`pipeline/cut.py`). From
then on the stage is sharded like a model of its own, over the ranks of the stage. Accelerate must
prepare the optimizer after the cut, so `integrations/prepare.py` cuts a model before it calls
Accelerate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts, find_parts
from hf_moe_ep.pipeline.cut import (
    assign_layers_to_stages,
    cut_model,
    list_parameters_outside,
    map_names_to_stages,
    select_parts_of_stage,
)
from hf_moe_ep.pipeline.run import Pipeline
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.routing.layers import RoutedLayers, find_routed_layers
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.modules import get_own_buffers, replace_call


def cut_into_stages(
    model: nn.Module, state: ModelState, options: ShardOptions, meshes: Meshes
) -> None:
    """Cut a model into stages, in place, and let its calls run the schedule.

    Every rank must call this function.

    Raises:
        ValueError: the model would compute in fp16, or it has parameters that belong to no stage.
    """
    stages = meshes.stages
    assert stages is not None
    if options.mp_policy.param_dtype == torch.float16:
        raise ValueError(
            f"pp_size={stages.size} computes gradients before a gradient scaler has multiplied the "
            f"loss, so gradients in fp16 would become zero; train in bf16"
        )
    parts = find_parts(model, state.plan)
    outside = list_parameters_outside(model, parts)
    if outside:
        raise ValueError(
            f"pp_size={stages.size} places adapters with the layers that they adapt, but "
            f"{outside[0]} belongs to no layer, embedding, final norm or head, as with prompts and "
            f"with adapters that share a bank of vectors; train a LoraConfig, or leave pp_size at 1"
        )
    layers = assign_layers_to_stages(len(parts.layers), state.config)
    values = _send_values(model, map_names_to_stages(model, parts, layers), options, meshes)
    routed = _describe_routing(parts, state)
    stage = cut_model(model, parts, state, stages.index, layers)
    stage.routed = routed
    stage.values = values
    stage.boundary.defers_aux_loss = state.config.pp_schedule == "gpipe"
    state.stage = stage
    replace_call(parts.root, Pipeline(parts.root, state))


def _describe_routing(parts: Parts, state: ModelState) -> RoutedLayers | str:
    """Return the layers whose routing can be replayed, or why there are none.

    After the cut a rank has the layers of its own stage only, so this runs before the cut.
    """
    try:
        return replace(find_routed_layers(parts.root, state), routed=())
    except ValueError as error:
        return str(error)


def find_parts_of_stage(model: nn.Module, state: ModelState) -> Parts:
    """Return the parts of a model, or with pipeline stages the parts of this rank's stage."""
    parts = find_parts(model, state.plan, complete=state.stage is None)
    return parts if state.stage is None else select_parts_of_stage(parts, state.stage)


@torch.no_grad()
def _send_values(
    model: nn.Module,
    stage_of: dict[str, int | None],
    options: ShardOptions,
    meshes: Meshes,
) -> dict[nn.Parameter, Tensor]:
    """Send the parameters and buffers of each stage from rank 0 to the stage's first rank.

    Returns the values of this rank's parameters, on the host. Buffers are replaced at once.
    """
    stages = meshes.stages
    assert stages is not None
    rank, first_ranks = dist.get_rank(), stages.first_ranks
    received: dict[nn.Parameter, Tensor] = {}
    if rank not in first_ranks:
        return received
    group = stages.column.get_group()

    def send_to_holders(name: str, tensor: Tensor) -> Tensor | None:
        """Send a tensor to the stages that hold it; return the copy that this rank receives."""
        stage = stage_of[name]
        holders = first_ranks if stage is None else [first_ranks[stage]]
        receivers = [holder for holder in holders if holder != 0]
        copies = [_transfer(tensor.detach(), r, rank, group, meshes.device) for r in receivers]
        return next((copy for copy in copies if copy is not None), None)

    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_plain = type(parameter) is nn.Parameter and parameter not in options.empty_params
        if is_plain and parameter not in options.ignored_params:
            value = send_to_holders(name, parameter)
            if value is not None and parameter not in received:
                received[parameter] = value.cpu()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in get_own_buffers(module).items():
            full_name = f"{prefix}.{name}".lstrip(".")
            value = None if buffer is None else send_to_holders(full_name, buffer)
            if value is not None:
                get_own_buffers(module)[name] = value
    return received


def _transfer(
    tensor: Tensor, receiver: int, rank: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor | None:
    """Send a tensor from rank 0 to the rank `receiver`.

    Returns the received copy on that rank, and None on all others.
    """
    if rank == 0:
        dist.send(tensor.to(device).contiguous(), receiver, group=group)
    elif rank == receiver:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.recv(value, 0, group=group)
        return value
    return None
