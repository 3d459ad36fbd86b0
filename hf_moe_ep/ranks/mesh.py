"""Create the device meshes of a model: two views of the same ranks.

Dense view: world = dp_replicate x fsdp. Expert view: world = dp_replicate x ep_fsdp x ep, so
ep_fsdp = world / (dp_replicate x ep). Non-expert parameters are sharded over fsdp. Expert
parameters are split by expert over ep, and then sharded over ep_fsdp.

8 ranks, ep_size 4, ep innermost (an ep group is consecutive ranks, so one node):

                 ep 0  ep 1  ep 2  ep 3
    ep_fsdp 0      0     1     2     3        ep groups       {0 1 2 3} {4 5 6 7}
    ep_fsdp 1      4     5     6     7        ep_fsdp groups  {0 4} {1 5} {2 6} {3 7}

With 128 experts rank 5 owns experts 32..63 (ep 1), half of each matrix (ep_fsdp 1). The ranks of
an sp group are consecutive and share their batches, so there are world / sp different batches.

`ep_outside=True` transposes the grid: ep groups {0 2 4 6} {1 3 5 7}, ep_fsdp groups {0 1} {2 3}
{4 5} {6 7}. dp_replicate is always outermost.

With dispatcher "hierarchical" an ep group on several nodes becomes a grid. On nodes of 2 ranks,
{0 1 2 3} has the groups {0 1} {2 3} inside a node, and the groups {0 2} {1 3} between ranks with
the same local index.

Expert weights are sharded over two axes. A sum over both, such as a gradient norm, uses one process
group of ep_fsdp x ep ranks. Our own clipping uses it (`sharding/clip.py`), and so does DTensor when
Accelerate or the Trainer clips.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ranks.interpreter_end import let_threads_finish
from hf_moe_ep.upstream.gloo import one_worker_thread
from hf_moe_ep.upstream.process_groups import flatten_axes, take_default_timeout

# Names of the axes.
DP_REPLICATE = "dp_replicate"
FSDP = "fsdp"
EP_FSDP = "ep_fsdp"
EP = "ep"
DATA = "data"
SP = "sp"
EP_GROUP = "ep_group"
EP_NODES = "ep_nodes"
EP_IN_NODE = "ep_in_node"


@dataclass(frozen=True)
class NodeMeshes:
    """An ep group with several ranks on each of several nodes.

    Attributes:
        between: mesh ("ep_nodes",) of the ranks with the same local index on their nodes.
        inside: mesh ("ep_in_node",) of the ranks on this node.
    """

    between: DeviceMesh
    inside: DeviceMesh


@dataclass(frozen=True)
class Meshes:
    """The meshes of one model.

    Attributes:
        dense: mesh of the non-expert parameters: ("fsdp",) or ("dp_replicate", "fsdp").
        ep_fsdp: mesh that shards one rank's experts further: ("ep_fsdp",), with HSDP
            ("dp_replicate", "ep_fsdp").
        ep: mesh ("ep",) that splits the experts.
        experts: mesh ("ep_fsdp_ep",) of the ranks that together hold one copy of all experts; None
            if this torch cannot create it.
        sp: mesh ("sp",) that splits a sequence.
        world_size: the number of ranks of the default process group; the model uses all of them.
        device: the device of parameters and batches.
        ep_outside, node_size: the values of the config.
        nodes: None with another dispatcher than "hierarchical", and if an ep group is on one node
            or has one rank per node: then there is nothing to exchange in two steps.
    """

    dense: DeviceMesh
    ep_fsdp: DeviceMesh
    ep: DeviceMesh
    experts: DeviceMesh | None
    sp: DeviceMesh
    world_size: int
    device: torch.device
    ep_outside: bool = False
    node_size: int | None = None
    nodes: NodeMeshes | None = None

    def fit(self, config: ParallelConfig, device: torch.device) -> bool:
        """Return True if `build_meshes` would create equal meshes."""
        sizes = (config.ep_size or 1, config.sp_size or 1, config.dp_replicate_size or 1)
        mine = (self.ep_size, self.sp_size, self.dp_replicate_size)
        like = (self.ep_outside, self.node_size, self.device)
        return mine == sizes and like == (config.ep_outside, config.node_size, device)

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
    """Create the meshes of `config` over the default group; every rank calls this.

    Gloo groups get one worker thread each (upstream/gloo.py says why).
    """
    with one_worker_thread():
        meshes, every_mesh = _lay_out_ranks(config, device)
    for mesh in every_mesh:
        take_default_timeout(mesh)
    return meshes


def _lay_out_ranks(config: ParallelConfig, device: torch.device) -> tuple[Meshes, list[DeviceMesh]]:
    """Return the meshes, and a list of meshes that includes every process group made for them."""
    let_threads_finish()
    world_size = dist.get_world_size()
    ep, replicate = config.ep_size or 1, config.dp_replicate_size or 1
    sp = config.sp_size or 1
    check_world(ep, replicate, world_size, sp)
    ep_fsdp = world_size // (replicate * ep)
    ranks = torch.arange(world_size)
    # With ep 1 both grids are equal, but torch 2.11 cannot slice a transposed mesh.
    if config.ep_outside and ep > 1:
        ranks = ranks.view(replicate, ep, ep_fsdp).transpose(1, 2)
    else:
        ranks = ranks.view(replicate, ep_fsdp, ep)
    whole = _group_of_all(device)
    alone = whole if whole is not None and world_size == 1 else _group_of_one()
    experts = _grid(ranks.contiguous(), (DP_REPLICATE, EP_FSDP, EP), device, alone, whole)
    everyone = torch.arange(world_size)
    dense = _grid(everyone.view(replicate, -1), (DP_REPLICATE, FSDP), device, alone, whole)
    sequence = _grid(everyone.view(-1, sp), (DATA, SP), device, alone, whole)
    over_both = flatten_axes(experts, (EP_FSDP, EP))
    every_mesh = [experts, dense, sequence, *([over_both] if over_both else [])]
    hsdp = replicate > 1
    nodes = None
    if config.dispatcher == "hierarchical" and ep > 1:
        grid = _grid_of_nodes(ranks.reshape(-1, ep), config.node_size, device)
        if grid is not None:
            nodes = NodeMeshes(between=grid[EP_NODES], inside=grid[EP_IN_NODE])
            every_mesh.append(grid)
    meshes = Meshes(
        dense=dense if hsdp else dense[FSDP],
        ep_fsdp=experts[DP_REPLICATE, EP_FSDP] if hsdp else experts[EP_FSDP],
        ep=experts[EP],
        experts=over_both,
        sp=sequence[SP],
        world_size=world_size,
        device=device,
        ep_outside=config.ep_outside,
        node_size=config.node_size,
        nodes=nodes,
    )
    return meshes, every_mesh


def _group_of_all(device: torch.device) -> dist.ProcessGroup | None:
    """Create a group of all ranks if the device is the CPU; otherwise return None.

    A DeviceMesh over all ranks would use the default group. The user created that group, and under
    gloo it has two worker threads (upstream/gloo.py says what they do).
    """
    if device.type != "cpu":
        return None
    group: dist.ProcessGroup = dist.new_group(group_desc="mesh_of_all_ranks")
    return group


def _group_of_one() -> dist.ProcessGroup:
    """Create a group of this rank alone, without communication.

    It is used for all axes of size 1; torch would create one group per rank, on every rank. In a
    world of one rank the default group is used.
    """
    if dist.get_world_size() == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, group_desc="mesh_of_one_rank"
    )
    return group


def _grid(
    ranks: torch.Tensor,
    names: tuple[str, ...],
    device: torch.device,
    alone: dist.ProcessGroup,
    whole: dist.ProcessGroup | None,
) -> DeviceMesh:
    """Create a mesh of all ranks with one axis per name; `ranks` has one dim per axis.

    `alone` is the group of axes of size 1. `whole`, if given, is the group of an axis of all ranks.
    """
    wide = tuple(name for name, size in zip(names, ranks.shape, strict=True) if size > 1)
    if len(wide) == len(names):
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    groups = dict.fromkeys(names, alone)
    if len(wide) == 1 and whole is not None:
        groups |= {wide[0]: whole}
    elif wide:
        made = DeviceMesh(device.type, ranks.squeeze(), mesh_dim_names=wide)
        groups |= {name: made.get_group(name) for name in wide}
    return DeviceMesh.from_group(
        list(groups.values()), device.type, mesh=ranks, mesh_dim_names=names
    )


def _grid_of_nodes(
    ep_groups: torch.Tensor, node_size: int | None, device: torch.device
) -> DeviceMesh | None:
    """Create the mesh of nodes and their ranks, or return None if a node has all or one rank.

    `ep_groups` is [groups, ranks of a group].
    """
    in_node, ep = ranks_in_node(ep_groups.tolist(), node_size), ep_groups.shape[1]
    if in_node in (1, ep):
        return None
    return DeviceMesh(
        device.type,
        ep_groups.reshape(-1, ep // in_node, in_node),
        mesh_dim_names=(EP_GROUP, EP_NODES, EP_IN_NODE),
    )


def ranks_in_node(ep_groups: list[list[int]], node_size: int | None) -> int:
    """Return the number of ranks that each ep group has on each of its nodes.

    Raises:
        ValueError: the number is not the same everywhere, or `node_size` is None.
    """
    if node_size is None:
        raise ValueError(
            "dispatcher='hierarchical' needs the number of ranks per node, and neither node_size "
            "nor the launcher's LOCAL_WORLD_SIZE is set; launch with torchrun or accelerate "
            "launch, or set node_size"
        )
    in_node = _on_nodes(ep_groups[0], node_size)[0]
    for group in ep_groups:
        on_nodes = _on_nodes(group, node_size)
        if set(on_nodes) != {in_node}:
            world = sum(map(len, ep_groups))
            sizes = [size for size in range(1, world + 1) if _splits_evenly(ep_groups, size)]
            raise ValueError(
                f"node_size ({node_size}) splits the ep group of ranks {_listed(group)} into "
                f"{' + '.join(map(str, on_nodes))} ranks, and dispatcher='hierarchical' needs the "
                f"same number on each node of every ep group; try node_size {_listed(sizes)}, "
                f"another ep_size, or dispatcher='all_to_all'"
            )
    return in_node


def _on_nodes(group: list[int], node_size: int) -> list[int]:
    """Count the ranks of a group on each of its nodes."""
    return list(Counter(rank // node_size for rank in group).values())


def _splits_evenly(groups: list[list[int]], node_size: int) -> bool:
    """Return True if all groups have the same number of ranks on all of their nodes."""
    return len({number for group in groups for number in _on_nodes(group, node_size)}) == 1


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def check_world(ep_size: int, dp_replicate_size: int, world_size: int, sp_size: int = 1) -> None:
    """Raise if the sizes do not divide the world; the error lists the sizes that do."""
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
