"""Keep expert weights out of FSDP2 where a rank holds its experts whole.

With ep_size (times etp_size) equal to the number of ranks, the mesh axis ep_fsdp has one rank: no
weight of an expert is sharded, and no gradient is reduced. FSDP2 would still copy the weights, four
times per step, and their gradients. The weights therefore become parameters that FSDP2 ignores:
DTensors with the mesh and the placements that FSDP2 would give them, so checkpoints, clipping and
optimizers see no difference.

    fp32 masters, bf16 compute       FSDP2 (torch 2.13)               outside of FSDP2
    forward                          cast to bf16, copy               cast to bf16
    backward                         cast to bf16, copy               cast to bf16
    gradient                         cast to fp32, division, copy     cast to fp32
    bytes per weight                 44                               18

The bytes are counted in `benchmarks/results/around-experts-cpu.md`, for each micro-batch.
Backward casts the weights again, so no copy in the compute dtype is kept between forward and
backward. If the dtypes agree, or if the weights are frozen, nothing is copied at all.

FSDP2 still handles these weights with several replicas (HSDP), with CPU offload, and with
experts_backend="eager", whose stock code needs plain tensors. It always handles adapters, which are
small.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.ranks.boxes import from_even_shards
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.values import ParameterEntries
from hf_moe_ep.state import ModelState


def can_stay_whole(state: ModelState, meshes: Meshes, options: ShardOptions) -> bool:
    """Return True if FSDP2 would have nothing to gather and to reduce for expert weights."""
    return (
        meshes.world_size > 1
        and meshes.ep_fsdp_size == 1
        and meshes.world_size == meshes.dispatch.size()
        and state.config.experts_backend != "eager"
        and not isinstance(options.offload_policy, CPUOffloadPolicy)
    )


def keep_whole(
    experts: nn.Module, entries: ParameterEntries, state: ModelState, meshes: Meshes
) -> dict[nn.Parameter, str]:
    """Replace the stacked weights of an experts module by parameters that FSDP2 must ignore.

    `entries` has the materialized parameters. FSDP2 shards the factors of adapters.

    Returns:
        The new parameters with their names.
    """
    new_parameters = {}
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            entry = entries.get(parameter)
            if entry is None or entry.stack is not None or not entry.over_ep:
                continue
            dim = 1 if state.config.expert_shard_dim == 1 and parameter.ndim > 1 else 0
            new = _make_sharded(parameter, *_find_layout_of_fsdp2(parameter, meshes, dim))
            for owner, _ in entry.owners:  # several modules may have the same weights
                setattr(owner, name, new)
            new_parameters[new] = name
    return new_parameters


def _make_sharded(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[object, ...]
) -> nn.Parameter:
    value = parameter.data
    assert isinstance(value, DTensor)
    sharded = DTensor.from_local(
        value.to_local(),
        mesh,
        placements,  # type: ignore[arg-type]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _find_layout_of_fsdp2(
    parameter: nn.Parameter, meshes: Meshes, dim: int
) -> tuple[DeviceMesh, tuple[object, ...]]:
    """Return the mesh and the placements that FSDP2 gives a weight that is split over ep and etp.

    Both depend on the version of torch. FSDP2 therefore shards a probe with one element per rank.
    """
    value = parameter.data
    assert isinstance(value, DTensor)
    probe = nn.Module()
    local = torch.zeros([1] * max(value.ndim, 2), device=meshes.device)
    split = from_even_shards(local, value.device_mesh, value.placements)
    probe.weight = nn.Parameter(split)
    fully_shard(probe, mesh=meshes.ep_fsdp, shard_placement_fn=lambda _: Shard(dim))
    weight = probe.weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh, tuple(weight.placements)
