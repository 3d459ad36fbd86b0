"""`build_meshes`: create the device meshes of a model. Each mesh arranges the same ranks in a grid.

    mesh        axes                           use
    dense       dp_replicate x fsdp            non-expert parameters are sharded over fsdp
    experts     dp_replicate x ep_fsdp x ep    experts are split over ep; the weights of each rank's
                                               experts are then sharded over ep_fsdp
    sequence    data x cp x sp                 the cp x sp ranks with one data index share a batch

dp_replicate is the number of copies of the sharded model (HSDP). The product of the axes of a mesh
is the world size, so ep_fsdp = world / (dp_replicate x ep).

In this example 8 ranks have ep_size 4. The ep axis is innermost, so the ranks of an ep group are
consecutive, and usually on one node:

                 ep 0  ep 1  ep 2  ep 3
    ep_fsdp 0      0     1     2     3        ep groups       {0 1 2 3} {4 5 6 7}
    ep_fsdp 1      4     5     6     7        ep_fsdp groups  {0 4} {1 5} {2 6} {3 7}

With 128 experts, rank 5 holds half (ep_fsdp 1) of each matrix of the experts 32..63 (ep 1). The
ranks that share a batch are consecutive as well, and sp is innermost: with cp 2 and sp 2, the ranks
0 to 3 share a batch, the sp groups are {0 1} {2 3}, and the cp groups are {0 2} {1 3}. There are
world / (cp x sp) different batches.

With pp_size > 1 the ranks are divided into pipeline stages of consecutive ranks. Everything above
holds inside each stage, and "world" means the ranks of one stage. A column consists of the ranks
with the same position in all stages. With pp_size 2 and ep_size 2 on 8 ranks:

    stage 0        stage 1
    0  1  2  3     4  5  6  7       ep groups  {0 1} {2 3} {4 5} {6 7}
                                    columns    {0 4} {1 5} {2 6} {3 7}

`ep_outside=True` transposes the grid. The groups of the first example are then ep {0 2 4 6}
{1 3 5 7} and ep_fsdp {0 1} {2 3} {4 5} {6 7}. dp_replicate is always outermost.

With dispatcher "hierarchical" an ep group on several nodes becomes a grid of nodes x ranks. If a
node has 2 ranks, the ep group {0 1 2 3} has these groups:

    inside a node    {0 1} {2 3}
    between nodes    {0 2} {1 3}      the ranks of a group have the same local index on their nodes

With etp_size > 1 (expert tensor parallelism) the experts' mesh has one more axis, dp_replicate x
ep_fsdp x ep x etp, and ep_fsdp = world / (dp_replicate x ep x etp). The ranks of an etp group share
the same experts, so tokens are dispatched in a group of ep x etp ranks. For example, 8 ranks with
ep_size 2 and etp_size 2:

                 ep 0         ep 1
                 etp 0  etp 1 etp 0  etp 1    dispatch groups {0 1 2 3} {4 5 6 7}
    ep_fsdp 0      0     1     2     3        etp groups      {0 1} {2 3} {4 5} {6 7}
    ep_fsdp 1      4     5     6     7        ep groups       {0 2} {1 3} {4 6} {5 7}

Expert weights are sharded over two or three axes. A sum over all these axes, such as a gradient
norm, uses a single process group of ep_fsdp x ep (x etp) ranks. The clipping of this package uses
this group (`sharding/clip.py`), and so does DTensor when Accelerate or the Trainer clips.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ranks.interpreter_end import let_threads_finish
from hf_moe_ep.upstream.gloo import one_worker_thread
from hf_moe_ep.upstream.process_groups import (
    flatten_axes,
    get_default_timeout,
    take_default_timeout,
)

# Names of the axes.
DP_REPLICATE = "dp_replicate"
FSDP = "fsdp"
EP_FSDP = "ep_fsdp"
EP = "ep"
ETP = "etp"
DISPATCH = "ep_etp"
DATA = "data"
CP = "cp"
SP = "sp"
SEQUENCE = "sequence"
EP_GROUP = "ep_group"
EP_NODES = "ep_nodes"
EP_IN_NODE = "ep_in_node"
PP = "pp"
STAGE = "stage"


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
class Stages:
    """The process groups of a model with several pipeline stages.

    Neighbours send hidden states in one group and gradients in another group. In a single group,
    NCCL would wait forever when two neighbours send to each other at the same time.

    Attributes:
        column: mesh ("pp",) of the ranks with the same position in each stage.
        group: group of the ranks of this stage.
        forwards: group of the column, for hidden states.
        backwards: group of the column, for the gradients of hidden states.
    """

    column: DeviceMesh
    group: dist.ProcessGroup
    forwards: dist.ProcessGroup
    backwards: dist.ProcessGroup

    @property
    def size(self) -> int:
        """The number of stages."""
        return self.column.size()

    @property
    def index(self) -> int:
        """The number of this rank's stage."""
        return self.column.get_local_rank()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def find_rank_in(self, stage: int) -> int:
        """Return the rank of this column in a stage."""
        return int(self.column.mesh[stage])

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each stage."""
        ranks_per_stage = dist.get_world_size(self.group)
        return [stage * ranks_per_stage for stage in range(self.size)]


@dataclass(frozen=True)
class Meshes:
    """The meshes of one model, or of this rank's stage if there are several pipeline stages.

    Attributes:
        dense: mesh of the non-expert parameters: ("fsdp",) or ("dp_replicate", "fsdp").
        ep_fsdp: mesh over which FSDP2 shards the experts of an ep rank: ("ep_fsdp",), with HSDP
            ("dp_replicate", "ep_fsdp").
        ep: mesh ("ep",) over which the experts are split.
        experts: mesh ("ep_fsdp_ep",), with etp_size > 1 ("ep_fsdp_ep_etp",), of the ranks that
            together hold one copy of all experts; None if this torch cannot create it.
        sp: mesh ("sp",) over which the heads of attention are split.
        cp: mesh ("cp",) over which a sequence is split in attention as well.
        sequence: mesh of the cp x sp ranks that share a batch. Its axis is "sequence" if both sizes
            are > 1, else "cp" or "sp".
        world_size: the number of ranks of this rank's stage. Without stages these are all ranks of
            the default process group.
        device: the device of parameters and batches.
        ep_outside, node_size: the values of the config.
        nodes: the ep group as a grid, for an exchange in two steps; None if the dispatcher is not
            "hierarchical", if the ep group is on one node, or if it has one rank per node.
        etp: mesh ("etp",) of the ranks that share the same experts; None if etp_size is 1.
        ep_etp: mesh ("ep", "etp") of the ranks that together have all experts; None if ep_size or
            etp_size is 1.
        dispatch_mesh: the ranks of `ep_etp` on one axis; None if `ep_etp` is None.
        stages: the pipeline stages; None if there is only one.
    """

    dense: DeviceMesh
    ep_fsdp: DeviceMesh
    ep: DeviceMesh
    experts: DeviceMesh | None
    sp: DeviceMesh
    cp: DeviceMesh
    sequence: DeviceMesh
    world_size: int
    device: torch.device
    ep_outside: bool = False
    node_size: int | None = None
    nodes: NodeMeshes | None = None
    etp: DeviceMesh | None = None
    ep_etp: DeviceMesh | None = None
    dispatch_mesh: DeviceMesh | None = None
    stages: Stages | None = None

    def fit(self, config: ParallelConfig, device: torch.device) -> bool:
        """Return True if `build_meshes(config, device)` would create equal meshes."""
        sizes = {name: getattr(self, name) for name in config.sizes}
        layout = (self.ep_outside, self.node_size, self.device)
        return sizes == config.sizes and layout == (config.ep_outside, config.node_size, device)

    @property
    def dp_replicate_size(self) -> int:
        return self.dense.size(0) if self.dense.ndim == 2 else 1

    @property
    def ep_size(self) -> int:
        return self.ep.size()

    @property
    def ep_rank(self) -> int:
        return self.ep.get_local_rank()

    def local_experts(self, num_experts: int) -> range:
        """Return the expert slots of this rank: L = E / ep_size consecutive numbers.

        Slot e has expert e, until `balance_experts` moves experts.
        """
        local = num_experts // self.ep_size
        return range(self.ep_rank * local, (self.ep_rank + 1) * local)

    @property
    def etp_size(self) -> int:
        return 1 if self.etp is None else self.etp.size()

    @property
    def etp_rank(self) -> int:
        return 0 if self.etp is None else self.etp.get_local_rank()

    @property
    def dispatch(self) -> DeviceMesh:
        """The mesh of the ranks that send each other tokens. Together they have all experts."""
        if self.dispatch_mesh is not None:
            return self.dispatch_mesh
        return self.ep if self.etp is None else self.etp

    @property
    def expert_axes(self) -> DeviceMesh:
        """The mesh whose axes split the experts' tensors before FSDP2: ep, etp, or both."""
        if self.ep_etp is not None:
            return self.ep_etp
        return self.ep if self.etp is None else self.etp

    @property
    def ep_fsdp_size(self) -> int:
        return self.ep_fsdp.size(-1)

    @property
    def sp_size(self) -> int:
        return self.sp.size()

    @property
    def cp_size(self) -> int:
        return self.cp.size()

    @property
    def ranks_per_batch(self) -> int:
        """The number of consecutive ranks that share a batch."""
        return self.sequence.size()

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_per_batch

    @property
    def pp_size(self) -> int:
        return 1 if self.stages is None else self.stages.size

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The group of the `world_size` ranks; None stands for the default group."""
        return None if self.stages is None else self.stages.group

    def list_groups(self) -> list[dist.ProcessGroup]:
        """List the process groups of this rank with several ranks."""
        meshes = [getattr(self, field.name) for field in fields(self)]
        if self.nodes is not None:
            meshes += [self.nodes.between, self.nodes.inside]
        groups = [
            group
            for mesh in meshes
            if isinstance(mesh, DeviceMesh)
            for group in mesh.get_all_groups()
        ]
        if self.stages is not None:
            stages = self.stages
            groups += [stages.column.get_group(), stages.group, stages.forwards, stages.backwards]
        by_name = {group.group_name: group for group in groups if group.size() > 1}
        return list(by_name.values())

    @property
    def first_rank(self) -> int:
        """The first rank of this rank's stage."""
        return 0 if self.stages is None else self.stages.first_ranks[self.stages.index]

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's batch, from 0 to `data_parallel_size` - 1."""
        return (dist.get_rank() - self.first_rank) // self.ranks_per_batch


class SharedMeshes:
    """The meshes of several models, such as a policy and its reference, or the models of a search.

    Models with equal layouts share their process groups, because torch keeps every group until the
    default group is destroyed. A copied model shares the groups of the original.
    """

    def __init__(self) -> None:
        self._meshes: list[Meshes] = []
        self._default_group: weakref.ref[dist.ProcessGroup] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMeshes:
        return self

    def find_or_build(self, config: ParallelConfig, device: torch.device) -> Meshes:
        """Return meshes of `config` over the current default group; every rank calls this."""
        default_group = dist.group.WORLD
        assert default_group is not None
        if self._default_group is None or self._default_group() is not default_group:
            self._meshes.clear()
            self._default_group = weakref.ref(default_group)
        for meshes in self._meshes:
            if meshes.fit(config, device):
                return meshes
        self._meshes.append(build_meshes(config, device))
        return self._meshes[-1]


def build_meshes(config: ParallelConfig, device: torch.device) -> Meshes:
    """Create the meshes of `config` over the default group; every rank calls this.

    Each gloo group gets one worker thread (upstream/gloo.py says why).
    """
    with one_worker_thread():
        meshes, every_mesh = _lay_out_ranks(config, device)
    for mesh in every_mesh:
        take_default_timeout(mesh)
    return meshes


def _lay_out_ranks(config: ParallelConfig, device: torch.device) -> tuple[Meshes, list[DeviceMesh]]:
    """Return the meshes, and a list of meshes with all process groups that were created."""
    let_threads_finish()
    num_ranks = dist.get_world_size()
    check_world(config, num_ranks)
    pp, replicate, ep, etp, cp, sp = config.sizes.values()
    world_size = num_ranks // pp
    ep_fsdp = world_size // (replicate * ep * etp)
    ranks = torch.arange(num_ranks)
    # With ep 1 the transposed grid has the same groups, but torch 2.11 cannot slice its mesh.
    if config.ep_outside and ep > 1:
        ranks = ranks.view(pp, replicate, ep, ep_fsdp, etp).transpose(2, 3).contiguous()
    # If etp_size is 1, the mesh has no axis etp, so that DTensors have one placement less.
    shape: tuple[int, ...] = (replicate, ep_fsdp, ep)
    names: tuple[str, ...] = (DP_REPLICATE, EP_FSDP, EP)
    if etp > 1:
        shape, names = (*shape, etp), (*names, ETP)
    ranks = ranks.view(pp, *shape)
    world_group = _create_group_of_all(device)
    own_group = world_group if world_group is not None and num_ranks == 1 else _create_own_group()

    def create_mesh(ranks: torch.Tensor, *names: str) -> DeviceMesh:
        """Create a mesh with these axes; the first dim of `ranks` counts the stages."""
        axes = (PP, *names) if pp > 1 else names
        return _create_mesh(ranks if pp > 1 else ranks[0], axes, device, own_group, world_group)

    experts = create_mesh(ranks, *names)
    in_order = torch.arange(num_ranks).view(pp, -1)
    dense = create_mesh(in_order.view(pp, replicate, -1), DP_REPLICATE, FSDP)
    split = create_mesh(in_order.view(pp, -1, cp, sp), DATA, CP, SP)
    flat_experts = flatten_axes(experts, names[1:])
    every_mesh = [experts, dense, split, *([flat_experts] if flat_experts else [])]
    sequence = split[SP] if cp == 1 else split[CP]
    if cp > 1 and sp > 1:
        batches = create_mesh(in_order.view(pp, -1, cp * sp), DATA, SEQUENCE)
        every_mesh.append(batches)
        sequence = batches[SEQUENCE]
    hsdp = replicate > 1
    dispatch_groups = ranks.reshape(-1, ep * etp)
    dispatch = None
    if ep > 1 and etp > 1:
        dispatch = create_mesh(ranks.reshape(pp, -1, ep * etp), EP_GROUP, DISPATCH)
        every_mesh.append(dispatch)
    nodes = None
    if config.dispatcher == "hierarchical" and ep * etp > 1:
        node_grid = _create_node_mesh(dispatch_groups, config.node_size, device)
        if node_grid is not None:
            nodes = NodeMeshes(between=node_grid[EP_NODES], inside=node_grid[EP_IN_NODE])
            every_mesh.append(node_grid)
    stages = None
    if pp > 1:
        pipeline = create_mesh(in_order, STAGE)
        every_mesh.append(pipeline)
        stages = _make_stages(pipeline, device)
    meshes = Meshes(
        dense=dense[DP_REPLICATE, FSDP] if hsdp and pp > 1 else dense if hsdp else dense[FSDP],
        ep_fsdp=experts[DP_REPLICATE, EP_FSDP] if hsdp else experts[EP_FSDP],
        ep=experts[EP],
        experts=flat_experts,
        sp=split[SP],
        cp=split[CP],
        sequence=sequence,
        world_size=world_size,
        device=device,
        ep_outside=config.ep_outside,
        node_size=config.node_size,
        nodes=nodes,
        etp=experts[ETP] if etp > 1 else None,
        ep_etp=experts[EP, ETP] if dispatch is not None else None,
        dispatch_mesh=None if dispatch is None else dispatch[DISPATCH],
        stages=stages,
    )
    return meshes, every_mesh


def _make_stages(pipeline: DeviceMesh, device: torch.device) -> Stages:
    """Create the groups of the pipeline stages from a mesh ("pp", "stage") of all ranks."""
    column = pipeline[PP]

    def new_group(direction: str) -> dist.ProcessGroup:
        # The timeout is set here, because a gloo group uses the timeout of its creation.
        group: dist.ProcessGroup = dist.new_group(
            column.mesh.tolist(),
            timeout=get_default_timeout(device),
            use_local_synchronization=True,
            group_desc=f"pipeline_{direction}",
        )
        return group

    return Stages(column, pipeline.get_group(STAGE), new_group("forwards"), new_group("backwards"))


def _create_group_of_all(device: torch.device) -> dist.ProcessGroup | None:
    """Create a group of all ranks if the device is the CPU; otherwise return None.

    Without this group, a DeviceMesh over all ranks would use the default group, which the user has
    created. A default group of gloo has two worker threads (upstream/gloo.py says why two threads
    are unsafe).
    """
    if device.type != "cpu":
        return None
    return dist.new_group(group_desc="mesh_of_all_ranks")


def _create_own_group() -> dist.ProcessGroup:
    """Create a group of this rank alone, without communication.

    All axes of size 1 use this group. Otherwise every rank would create one group per rank of the
    world. In a world of one rank, the default group is returned.
    """
    if dist.get_world_size() == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, group_desc="mesh_of_one_rank"
    )
    return group


def _create_mesh(
    ranks: torch.Tensor,
    names: tuple[str, ...],
    device: torch.device,
    own_group: dist.ProcessGroup,
    world_group: dist.ProcessGroup | None,
) -> DeviceMesh:
    """Create a mesh of all ranks with one axis per name; `ranks` has one dim per axis.

    Axes of size 1 use `own_group`. An axis with all ranks uses `world_group`, unless this is None.
    """
    wide_axes = tuple(name for name, size in zip(names, ranks.shape, strict=True) if size > 1)
    if len(wide_axes) == len(names):
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    groups = dict.fromkeys(names, own_group)
    if len(wide_axes) == 1 and world_group is not None:
        groups |= {wide_axes[0]: world_group}
    elif wide_axes:
        wide_mesh = DeviceMesh(device.type, ranks.squeeze(), mesh_dim_names=wide_axes)
        groups |= {name: wide_mesh.get_group(name) for name in wide_axes}
    return DeviceMesh.from_group(
        list(groups.values()), device.type, mesh=ranks, mesh_dim_names=names
    )


def _create_node_mesh(
    ep_groups: torch.Tensor, node_size: int | None, device: torch.device
) -> DeviceMesh | None:
    """Create a mesh of ep groups x nodes x ranks; `ep_groups` is [groups, ranks of a group].

    Return None if a node has only one rank of an ep group, or if it has all of them.
    """
    in_node, ep = count_ranks_in_node(ep_groups.tolist(), node_size), ep_groups.shape[1]
    if in_node in (1, ep):
        return None
    return DeviceMesh(
        device.type,
        ep_groups.reshape(-1, ep // in_node, in_node),
        mesh_dim_names=(EP_GROUP, EP_NODES, EP_IN_NODE),
    )


def count_ranks_in_node(ep_groups: list[list[int]], node_size: int | None) -> int:
    """Return the number of ranks that each ep group has on each of its nodes.

    Raises:
        ValueError: the number differs between nodes or ep groups, or `node_size` is None.
    """
    if node_size is None:
        raise ValueError(
            "dispatcher='hierarchical' needs the number of ranks per node, and neither node_size "
            "nor the launcher's LOCAL_WORLD_SIZE is set; launch with torchrun or accelerate "
            "launch, or set node_size"
        )
    in_node = _count_by_node(ep_groups[0], node_size)[0]
    for group in ep_groups:
        counts = _count_by_node(group, node_size)
        if set(counts) != {in_node}:
            world = sum(map(len, ep_groups))
            sizes = [size for size in range(1, world + 1) if _splits_evenly(ep_groups, size)]
            raise ValueError(
                f"node_size ({node_size}) splits the ep group of ranks {_join(group)} into "
                f"{' + '.join(map(str, counts))} ranks, and dispatcher='hierarchical' needs the "
                f"same number on each node of every ep group; try node_size {_join(sizes)}, "
                f"another ep_size, or dispatcher='all_to_all'"
            )
    return in_node


def _count_by_node(group: list[int], node_size: int) -> list[int]:
    """Count the ranks of a group on each of its nodes."""
    return list(Counter(rank // node_size for rank in group).values())


def _splits_evenly(groups: list[list[int]], node_size: int) -> bool:
    """Return True if all groups have the same number of ranks on all of their nodes."""
    return len({count for group in groups for count in _count_by_node(group, node_size)}) == 1


def _join(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def check_stages(pp_size: int, num_ranks: int) -> None:
    """Raise ValueError if the ranks cannot be divided into `pp_size` stages of equal size."""
    if pp_size > num_ranks or num_ranks % pp_size:
        raise ValueError(
            f"pp_size ({pp_size}) must divide the number of ranks ({num_ranks}); try "
            f"{_list_divisors(num_ranks)}, or launch a multiple of {pp_size} processes"
        )


def check_world(config: ParallelConfig, num_ranks: int) -> None:
    """Raise ValueError if the sizes do not divide the number of ranks.

    The messages list valid sizes. "world size" in a message is the number of ranks of one stage.
    """
    pp, replicate, ep, etp, cp, sp = config.sizes.values()
    check_stages(pp, num_ranks)
    world = num_ranks // pp
    if replicate > world or world % replicate:
        raise ValueError(
            f"dp_replicate_size ({replicate}) must divide the world size ({world}); try "
            f"{_list_divisors(world)}"
        )
    ranks = world // replicate
    sizes = {"ep_size": ep, "sp_size": sp, "cp_size": cp}
    if cp > 1 and sp > 1:
        sizes[f"cp_size x sp_size = {cp} x {sp}"] = cp * sp
    for name, size in sizes.items():
        if size > ranks or ranks % size:
            raise ValueError(
                f"{name} ({size}) must divide world size / dp_replicate_size ({world} / "
                f"{replicate} = {ranks}); try {_list_divisors(ranks)}, or launch a multiple of "
                f"{size * replicate * pp} processes"
            )
    if etp > 1 and ranks % (ep * etp):
        raise ValueError(
            f"etp_size ({etp}) times ep_size ({ep}) must divide world size / dp_replicate_size "
            f"({world} / {replicate} = {ranks}); with ep_size {ep} try etp_size "
            f"{_list_divisors(ranks // ep)}, or launch a multiple of {ep * etp * replicate * pp} "
            f"processes"
        )


def _list_divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
