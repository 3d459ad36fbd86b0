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

With dispatcher "hierarchical" an ep group on several nodes is a grid of its own: on nodes of 2
ranks, {0 1 2 3} has the groups {0 1} {2 3} inside a node, and {0 2} {1 3} between ranks that have
the same place on theirs.

Expert weights lie on two axes. What is added up over both, such as a norm of gradients, goes over
one group of ep_fsdp x ep ranks: our own clip takes it (`sharding/clip.py`), and so does DTensor
where Accelerate and the Trainer clip.
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
        between: mesh ("ep_nodes",) of the ranks that have the same place on their nodes.
        inside: mesh ("ep_in_node",) of the ranks on this node.
    """

    between: DeviceMesh
    inside: DeviceMesh


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
        ep_outside, node_size: as the config has it.
        nodes: None where rows cross nodes as often whoever carries them: an ep group on one node,
            or with one rank on each; or where the config does not ask.
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
        """Tell whether `build_meshes` would lay the ranks out just so."""
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
    """Create the process groups of `config` over the default group; every rank calls this.

    Groups of gloo have one worker thread each (upstream/gloo.py says why).
    """
    with one_worker_thread():
        return _lay_out_ranks(config, device)


def _lay_out_ranks(config: ParallelConfig, device: torch.device) -> Meshes:
    let_threads_finish()
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
    whole = _group_of_all(device)
    alone = whole if whole is not None and world_size == 1 else _group_of_one()
    experts = _grid(ranks.contiguous(), (DP_REPLICATE, EP_FSDP, EP), device, alone, whole)
    everyone = torch.arange(world_size)
    dense = _grid(everyone.view(replicate, -1), (DP_REPLICATE, FSDP), device, alone, whole)
    sequence = _grid(everyone.view(-1, sp), (DATA, SP), device, alone, whole)
    over_both = flatten_axes(experts, (EP_FSDP, EP))
    for mesh in (experts, dense, sequence, *([over_both] if over_both else [])):
        take_default_timeout(mesh)
    hsdp = replicate > 1
    nodes = None
    if config.dispatcher == "hierarchical" and ep > 1:
        nodes = _build_nodes(ranks.reshape(-1, ep), config.node_size, device)
    return Meshes(
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


def _group_of_all(device: torch.device) -> dist.ProcessGroup | None:
    """Create a group of all ranks on CPUs; return None elsewhere.

    A DeviceMesh over all ranks takes the default group. That group is the user's and has two worker
    threads under gloo (upstream/gloo.py says what they do).
    """
    if device.type != "cpu":
        return None
    group: dist.ProcessGroup = dist.new_group(group_desc="mesh_of_all_ranks")
    return group


def _group_of_one() -> dist.ProcessGroup:
    """Create a group of this rank alone, without a word to the other ranks.

    It serves the axes of one rank, for which torch would create a group per rank, on every rank.
    The default group of a world of one rank serves as well.
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
    """Create a mesh of `ranks`, which are all ranks, with a dim for each name.

    `alone` serves the axes of one rank, and `whole` an axis of all ranks where it is given.
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


def _build_nodes(
    ep_groups: torch.Tensor, node_size: int | None, device: torch.device
) -> NodeMeshes | None:
    """Create the groups between and inside nodes; None where these are ep groups or single ranks.

    `ep_groups` is [groups, ranks of one].
    """
    in_node, ep = ranks_in_node(ep_groups.tolist(), node_size), ep_groups.shape[1]
    if in_node in (1, ep):
        return None
    grid = DeviceMesh(
        device.type,
        ep_groups.reshape(-1, ep // in_node, in_node),
        mesh_dim_names=(EP_GROUP, EP_NODES, EP_IN_NODE),
    )
    take_default_timeout(grid)
    return NodeMeshes(between=grid[EP_NODES], inside=grid[EP_IN_NODE])


def ranks_in_node(ep_groups: list[list[int]], node_size: int | None) -> int:
    """Count the ranks that an ep group has on each of its nodes; a node is `node_size` ranks.

    Raises:
        ValueError: they are not equally many everywhere, or nobody says how large a node is.
    """
    if node_size is None:
        raise ValueError(
            "dispatcher='hierarchical' has to know how many ranks a node has, and neither "
            "node_size nor the launcher's LOCAL_WORLD_SIZE says it; launch with torchrun or "
            "accelerate launch, or set node_size"
        )
    in_node = _on_nodes(ep_groups[0], node_size)[0]
    for group in ep_groups:
        on_nodes = _on_nodes(group, node_size)
        if set(on_nodes) != {in_node}:
            world = sum(map(len, ep_groups))
            sizes = [size for size in range(1, world + 1) if _cuts_evenly(ep_groups, size)]
            raise ValueError(
                f"node_size ({node_size}) cuts the ep group of ranks {_listed(group)} into "
                f"{' + '.join(map(str, on_nodes))} ranks, and dispatcher='hierarchical' needs "
                f"equally many on each node of every ep group; try node_size {_listed(sizes)}, "
                f"another ep_size, or dispatcher='all_to_all'"
            )
    return in_node


def _on_nodes(group: list[int], node_size: int) -> list[int]:
    """Count the ranks of a group on each node that has some of them."""
    return list(Counter(rank // node_size for rank in group).values())


def _cuts_evenly(groups: list[list[int]], node_size: int) -> bool:
    """Tell whether all groups have one number of ranks on all of their nodes."""
    return len({number for group in groups for number in _on_nodes(group, node_size)}) == 1


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


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
