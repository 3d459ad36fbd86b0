"""The only place that lays ranks out: two views of the same world.

Dense view: world = dp_replicate x fsdp. Expert view: world = dp_replicate x ep_fsdp x ep, so
ep_fsdp = world / (dp_replicate x ep). Non-expert parameters are sharded over fsdp, expert
parameters split by expert over ep and then sharded over ep_fsdp.

8 ranks, ep_size 4, ep innermost (an ep group is consecutive ranks, so one node):

                 ep 0  ep 1  ep 2  ep 3
    ep_fsdp 0      0     1     2     3        ep groups       {0 1 2 3} {4 5 6 7}
    ep_fsdp 1      4     5     6     7        ep_fsdp groups  {0 4} {1 5} {2 6} {3 7}

With 128 experts rank 5 owns experts 32..63 (ep 1), half of each matrix (ep_fsdp 1).
Ranks of an sp group, always consecutive, share their batches: world / sp of them differ.

`ep_outside=True` transposes the grid: ep groups {0 2 4 6} {1 3 5 7}, ep_fsdp groups {0 1} {2 3}
{4 5} {6 7}. dp_replicate is always outermost.

Expert weights lie on two axes. What is added up over both, such as a norm of gradients, goes over
one group of ep_fsdp x ep ranks: our own clip takes it (`sharding/clip.py`), and so does DTensor
where Accelerate and the Trainer clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ranks.interpreter_end import let_threads_finish
from hf_moe_ep.ranks.places import tell_on_abort
from hf_moe_ep.upstream.process_groups import flatten_axes

# Names of the axes.
DP_REPLICATE = "dp_replicate"
FSDP = "fsdp"
EP_FSDP = "ep_fsdp"
EP = "ep"
DATA = "data"
SP = "sp"


@dataclass(frozen=True)
class Meshes:
    """Where one model lives.

    Attributes:
        dense: mesh of the non-expert parameters: ("fsdp",) or ("dp_replicate", "fsdp").
        ep_fsdp: mesh that shards one rank's experts further: ("ep_fsdp",), with HSDP
            ("dp_replicate", "ep_fsdp").
        ep: mesh ("ep",) that splits the experts.
        experts: mesh ("ep_fsdp_ep",) of the ranks that hold one copy of all experts together; None
            where this torch cannot make it.
        sp: mesh ("sp",) that splits a sequence.
        world_size: ranks of the default process group, all of which take part.
        device: where parameters and batches live.
        ep_outside: as the config has it.
    """

    dense: DeviceMesh
    ep_fsdp: DeviceMesh
    ep: DeviceMesh
    experts: DeviceMesh | None
    sp: DeviceMesh
    world_size: int
    device: torch.device
    ep_outside: bool = False

    def fit(self, config: ParallelConfig, device: torch.device) -> bool:
        """Tell whether `build_meshes` would lay the ranks out just so."""
        sizes = (config.ep_size or 1, config.sp_size or 1, config.dp_replicate_size or 1)
        mine = (self.ep_size, self.sp_size, self.dp_replicate_size)
        return mine == sizes and self.ep_outside == config.ep_outside and self.device == device

    @property
    def dp_replicate_size(self) -> int:
        return self.dense.size(0) if self.dense.ndim == 2 else 1

    @property
    def ep_size(self) -> int:
        return self.ep.size()

    @property
    def ep_rank(self) -> int:
        return self.ep.get_local_rank()

    @property
    def ep_fsdp_size(self) -> int:
        return self.ep_fsdp.size(-1)

    @property
    def sp_size(self) -> int:
        return self.sp.size()

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.sp_size


def build_meshes(config: ParallelConfig, device: torch.device) -> Meshes:
    """Create the process groups of `config` over the default group; every rank calls this."""
    let_threads_finish()
    if device.type == "cuda":
        tell_on_abort(device)
    world_size = dist.get_world_size()
    ep, replicate = config.ep_size or 1, config.dp_replicate_size or 1
    sp = config.sp_size or 1
    check_world(ep, replicate, world_size, sp)
    ep_fsdp = world_size // (replicate * ep)
    ranks = torch.arange(world_size)
    # With ep 1 both are the same, but torch 2.11 slices no mesh with the strides of a transpose.
    if config.ep_outside and ep > 1:
        ranks = ranks.view(replicate, ep, ep_fsdp).transpose(1, 2)
    else:
        ranks = ranks.view(replicate, ep_fsdp, ep)
    experts = DeviceMesh(
        device.type, ranks.contiguous(), mesh_dim_names=(DP_REPLICATE, EP_FSDP, EP)
    )
    dense = init_device_mesh(
        device.type,
        (replicate, world_size // replicate),
        mesh_dim_names=(DP_REPLICATE, FSDP),
    )
    sequence = init_device_mesh(device.type, (world_size // sp, sp), mesh_dim_names=(DATA, SP))
    hsdp = replicate > 1
    return Meshes(
        dense=dense if hsdp else dense[FSDP],
        ep_fsdp=experts[DP_REPLICATE, EP_FSDP] if hsdp else experts[EP_FSDP],
        ep=experts[EP],
        experts=flatten_axes(experts, (EP_FSDP, EP)),
        sp=sequence[SP],
        world_size=world_size,
        device=device,
        ep_outside=config.ep_outside,
    )


def check_world(ep_size: int, dp_replicate_size: int, world_size: int, sp_size: int = 1) -> None:
    """Raise where the sizes do not tile the world, naming the sizes that would."""
    if dp_replicate_size > world_size or world_size % dp_replicate_size:
        raise ValueError(
            f"dp_replicate_size ({dp_replicate_size}) must divide the world size ({world_size}); "
            f"try {_divisors(world_size)}"
        )
    shard = world_size // dp_replicate_size
    for name, size in (("ep_size", ep_size), ("sp_size", sp_size)):
        if size > shard or shard % size:
            raise ValueError(
                f"{name} ({size}) must divide world size / dp_replicate_size "
                f"({world_size} / {dp_replicate_size} = {shard}); try {_divisors(shard)}, "
                f"or launch a multiple of {size * dp_replicate_size} processes"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
