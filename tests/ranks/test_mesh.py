"""The meshes of 8 ranks have the expected groups, such as the groups in the docstring of mesh.py.

With torch's fake process group every rank builds its meshes, and the ranks in its groups are
compared. The parity tests show that collectives in these groups give the right numbers.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_moe_ep import ParallelConfig
from hf_moe_ep.ranks.mesh import Meshes, SharedMeshes, build_meshes, check_world
from hf_moe_ep.upstream.process_groups import fake_group, take_default_timeout

CPU = torch.device("cpu")
Groups = list[list[int]]


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Layout:
    """The expected groups. The index of a rank in its group is its local rank in the mesh."""

    config: ParallelConfig
    ep: Groups
    ep_fsdp: Groups
    fsdp: Groups
    replicate: Groups


ALL = [0, 1, 2, 3, 4, 5, 6, 7]
SINGLES = [[rank] for rank in ALL]
LAYOUTS = {
    "docstring": Layout(
        ParallelConfig(ep_size=4),
        ep=[[0, 1, 2, 3], [4, 5, 6, 7]],
        ep_fsdp=[[0, 4], [1, 5], [2, 6], [3, 7]],
        fsdp=[ALL],
        replicate=SINGLES,
    ),
    "docstring, ep_outside": Layout(
        ParallelConfig(ep_size=4, ep_outside=True),
        ep=[[0, 2, 4, 6], [1, 3, 5, 7]],
        ep_fsdp=[[0, 1], [2, 3], [4, 5], [6, 7]],
        fsdp=[ALL],
        replicate=SINGLES,
    ),
    "no sizes": Layout(ParallelConfig(), ep=SINGLES, ep_fsdp=[ALL], fsdp=[ALL], replicate=SINGLES),
    "ep over all": Layout(
        ParallelConfig(ep_size=8), ep=[ALL], ep_fsdp=SINGLES, fsdp=[ALL], replicate=SINGLES
    ),
    "HSDP": Layout(
        ParallelConfig(ep_size=2, dp_replicate_size=2),
        ep=[[0, 1], [2, 3], [4, 5], [6, 7]],
        ep_fsdp=[[0, 2], [1, 3], [4, 6], [5, 7]],
        fsdp=[[0, 1, 2, 3], [4, 5, 6, 7]],
        replicate=[[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "HSDP, ep_outside": Layout(
        ParallelConfig(ep_size=2, dp_replicate_size=2, ep_outside=True),
        ep=[[0, 2], [1, 3], [4, 6], [5, 7]],
        ep_fsdp=[[0, 1], [2, 3], [4, 5], [6, 7]],
        fsdp=[[0, 1, 2, 3], [4, 5, 6, 7]],
        replicate=[[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "HSDP, ep fills a replica": Layout(
        ParallelConfig(ep_size=4, dp_replicate_size=2),
        ep=[[0, 1, 2, 3], [4, 5, 6, 7]],
        ep_fsdp=SINGLES,
        fsdp=[[0, 1, 2, 3], [4, 5, 6, 7]],
        replicate=[[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "only replicas": Layout(
        ParallelConfig(dp_replicate_size=8),
        ep=SINGLES,
        ep_fsdp=SINGLES,
        fsdp=SINGLES,
        replicate=[ALL],
    ),
}


def _list_members(mesh: DeviceMesh, axis: int) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


def _check_axis(mesh: DeviceMesh, axis: int, rank: int, groups: Groups) -> None:
    group_of_rank = next(group for group in groups if rank in group)
    assert _list_members(mesh, axis) == group_of_rank, (rank, mesh)
    assert mesh.size(axis) == len(group_of_rank)
    assert mesh.get_local_rank(axis) == group_of_rank.index(rank)


def _check_rank(layout: Layout, meshes: Meshes, rank: int) -> None:
    _check_axis(meshes.ep, 0, rank, layout.ep)
    _check_axis(meshes.ep_fsdp, -1 % meshes.ep_fsdp.ndim, rank, layout.ep_fsdp)
    _check_axis(meshes.dense, -1 % meshes.dense.ndim, rank, layout.fsdp)
    names = ("fsdp",), ("ep_fsdp",)
    if layout.config.dp_replicate_size:
        _check_axis(meshes.dense, 0, rank, layout.replicate)
        _check_axis(meshes.ep_fsdp, 0, rank, layout.replicate)
        names = ("dp_replicate", "fsdp"), ("dp_replicate", "ep_fsdp")
    assert (meshes.dense.mesh_dim_names, meshes.ep_fsdp.mesh_dim_names) == names
    assert meshes.ep.mesh_dim_names == ("ep",)
    if meshes.experts is not None:  # up to torch 2.11, ep_outside does not allow this mesh
        replica = next(group for group in layout.fsdp if rank in group)
        assert sorted(_list_members(meshes.experts, 0)) == replica
    else:
        assert layout.config.ep_outside
    ep_group = next(group for group in layout.ep if rank in group)
    assert (meshes.ep_size, meshes.ep_rank) == (len(ep_group), ep_group.index(rank))
    assert meshes.ep_fsdp_size == len(layout.ep_fsdp[0])
    assert (meshes.world_size, meshes.device) == (8, CPU)
    fitting = [other for other in LAYOUTS.values() if meshes.fit(other.config, CPU)]
    assert fitting == [layout] and not meshes.fit(layout.config, torch.device("cuda", 0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_has_the_groups_of_the_layout(name: str) -> None:
    layout = LAYOUTS[name]
    for rank in range(8):
        with _as_rank(rank, 8):
            _check_rank(layout, build_meshes(layout.config, CPU), rank)


def test_the_world_size_need_not_be_a_power_of_two() -> None:
    """6 ranks are 2 replicas, each with an ep group of 3 ranks."""
    for rank in range(6):
        with _as_rank(rank, 6):
            meshes = build_meshes(ParallelConfig(ep_size=3, dp_replicate_size=2), CPU)
            assert _list_members(meshes.ep, 0) == ([0, 1, 2] if rank < 3 else [3, 4, 5])
            assert _list_members(meshes.dense, 0) == [rank % 3, rank % 3 + 3]


def test_two_models_have_separate_meshes() -> None:
    with _as_rank(5, 8):
        wide = build_meshes(ParallelConfig(ep_size=4), CPU)
        narrow = build_meshes(ParallelConfig(ep_size=2), CPU)
        assert _list_members(wide.ep, 0) == [4, 5, 6, 7] and _list_members(narrow.ep, 0) == [4, 5]


def test_models_share_groups_until_the_default_group_is_destroyed() -> None:
    shared, config = SharedMeshes(), ParallelConfig(ep_size=4)
    found = []
    for _ in range(2):
        with _as_rank(5, 8):
            meshes = shared.find_or_build(config, CPU)
            groups = len(_world.pg_map)
            assert copy.deepcopy(shared).find_or_build(config, CPU) is meshes
            assert len(_world.pg_map) == groups
            assert shared.find_or_build(ParallelConfig(ep_size=2), CPU) is not meshes
            assert len(_world.pg_map) > groups
            assert shared.find_or_build(config, CPU) is meshes
            assert all(group in _world.pg_map for group in meshes.list_groups())
            found.append(meshes)
    assert found[0] is not found[1]


def test_sp_groups_are_consecutive_ranks() -> None:
    for rank in range(8):
        with _as_rank(rank, 8):
            meshes = build_meshes(ParallelConfig(ep_size=4, sp_size=2, dp_replicate_size=2), CPU)
            assert _list_members(meshes.sp, 0) == [rank // 2 * 2, rank // 2 * 2 + 1]
    match = r"sp_size \(8\).*8 / 2 = 4.*try 1, 2, 4"
    with _as_rank(0, 8), pytest.raises(ValueError, match=match):
        build_meshes(ParallelConfig(sp_size=8, dp_replicate_size=2), CPU)


def test_sp_is_the_innermost_axis_and_cp_the_next() -> None:
    """With cp 2 and sp 2, the ranks 0-3 share a batch, and so do the ranks 4-7."""
    cp_groups = ([0, 2], [1, 3], [4, 6], [5, 7])
    for rank in range(8):
        with _as_rank(rank, 8):
            config = ParallelConfig(ep_size=4, sp_size=2, cp_size=2, dp_replicate_size=2)
            meshes = build_meshes(config, CPU)
            assert _list_members(meshes.sp, 0) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert _list_members(meshes.cp, 0) == next(g for g in cp_groups if rank in g)
            assert _list_members(meshes.sequence, 0) == [*range(rank // 4 * 4, rank // 4 * 4 + 4)]
            assert (meshes.ranks_per_batch, meshes.data_parallel_size) == (4, 2)
            assert meshes.fit(config, CPU)
            assert not meshes.fit(replace(config, cp_size=1), CPU)
    with _as_rank(3, 4):
        meshes = build_meshes(ParallelConfig(cp_size=2), CPU)
        assert _list_members(meshes.sequence, 0) == _list_members(meshes.cp, 0) == [2, 3]


CP_REFUSED = [
    ({"cp_size": 8, "dp_replicate_size": 2}, r"cp_size \(8\).*8 / 2 = 4.*try 1, 2, 4"),
    ({"cp_size": 4, "sp_size": 4}, r"cp_size x sp_size = 4 x 4 \(16\).*8 / 1 = 8.*try 1, 2, 4, 8"),
]


@pytest.mark.parametrize(("sizes", "match"), CP_REFUSED)
def test_context_sizes_that_do_not_divide_the_world_are_refused(
    sizes: dict[str, int], match: str
) -> None:
    with _as_rank(0, 8), pytest.raises(ValueError, match=match):
        build_meshes(ParallelConfig(**sizes), CPU)


# name: (config, ep groups, ep_fsdp groups, fsdp groups, columns of the stages)
STAGES: dict[str, tuple[ParallelConfig, Groups, Groups, Groups, Groups]] = {
    "docstring": (
        ParallelConfig(pp_size=2, ep_size=2),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "ep_outside": (
        ParallelConfig(pp_size=2, ep_size=2, ep_outside=True),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "4 stages": (
        ParallelConfig(pp_size=4, ep_size=2),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        SINGLES,
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ),
    "HSDP": (
        ParallelConfig(pp_size=2, ep_size=2, dp_replicate_size=2),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        SINGLES,
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "a rank per stage": (ParallelConfig(pp_size=8), SINGLES, SINGLES, SINGLES, [ALL]),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_have_the_expected_groups(name: str) -> None:
    config, ep, ep_fsdp, fsdp, columns = STAGES[name]
    pp_size = config.pp_size or 1
    for rank in range(8):
        with _as_rank(rank, 8):
            meshes = build_meshes(config, CPU)
            assert meshes.fit(config, CPU) and not meshes.fit(ParallelConfig(), CPU)
            _check_axis(meshes.ep, 0, rank, ep)
            _check_axis(meshes.ep_fsdp, -1 % meshes.ep_fsdp.ndim, rank, ep_fsdp)
            _check_axis(meshes.dense, -1 % meshes.dense.ndim, rank, fsdp)
            stages = meshes.stages
            assert stages is not None
            _check_axis(stages.column, 0, rank, columns)
            column = next(group for group in columns if rank in group)
            for group in (stages.forwards, stages.backwards):
                assert dist.get_process_group_ranks(group) == column
            own = [other for other in range(8) if other // (8 // pp_size) == stages.index]
            assert dist.get_process_group_ranks(stages.group) == own
            assert (meshes.world_size, meshes.first_rank) == (len(own), own[0])
            assert [stages.find_rank_in(stage) for stage in range(pp_size)] == column
            assert (stages.is_first, stages.is_last) == (rank == column[0], rank == column[-1])
            if config.dp_replicate_size:
                assert _list_members(meshes.dense, 0) == [own[0] + rank % 2, own[0] + rank % 2 + 2]


def test_stages_have_their_own_data_ranks_and_refuse_wrong_sizes() -> None:
    config = ParallelConfig(pp_size=2, ep_size=2, sp_size=2)
    for rank in range(8):
        with _as_rank(rank, 8):
            meshes = build_meshes(config, CPU)
            assert _list_members(meshes.sp, 0) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert (meshes.data_parallel_size, meshes.data_parallel_rank) == (2, rank % 4 // 2)
    with _as_rank(0, 8):
        with pytest.raises(ValueError, match=r"pp_size \(3\).*number of ranks \(8\); try 1, 2, 4"):
            build_meshes(ParallelConfig(pp_size=3), CPU)
        with pytest.raises(ValueError, match=r"ep_size \(8\).*4 / 1 = 4.*try 1, 2, 4"):
            build_meshes(ParallelConfig(pp_size=2, ep_size=8), CPU)


def _make_hierarchical(node_size: int, **sizes: Any) -> ParallelConfig:
    return ParallelConfig(dispatcher="hierarchical", node_size=node_size, **sizes)


# name: (config, groups between nodes, groups inside a node). Without a node mesh, groups are None.
NODES: dict[str, tuple[ParallelConfig, Groups | None, Groups | None]] = {
    "docstring": (
        _make_hierarchical(2, ep_size=4),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    "2 nodes of 4": (
        _make_hierarchical(4, ep_size=8),
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "4 nodes of 2": (
        _make_hierarchical(2, ep_size=8),
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    # An ep group has every second rank: 2 ranks on each node.
    "ep_outside": (
        _make_hierarchical(4, ep_size=4, ep_outside=True),
        [[0, 4], [2, 6], [1, 5], [3, 7]],
        [[0, 2], [4, 6], [1, 3], [5, 7]],
    ),
    "HSDP": (
        _make_hierarchical(2, ep_size=4, dp_replicate_size=2),
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
    "a node holds ep groups": (_make_hierarchical(4, ep_size=2), None, None),
    "a node is the world": (_make_hierarchical(8, ep_size=8), None, None),
    "a rank on each node": (_make_hierarchical(2, ep_size=4, ep_outside=True), None, None),
    "nodes of one": (_make_hierarchical(1, ep_size=8), None, None),
    "no ep": (_make_hierarchical(4), None, None),
}


@pytest.mark.parametrize("name", NODES)
def test_every_rank_has_the_expected_node_groups(name: str) -> None:
    config, between, inside = NODES[name]
    for rank in range(8):
        with _as_rank(rank, 8):
            meshes = build_meshes(config, CPU)
            assert meshes.fit(config, CPU)
            assert not meshes.fit(replace(config, node_size=3), CPU)
            if between is None or inside is None:
                assert meshes.nodes is None
                continue
            assert meshes.nodes is not None
            _check_axis(meshes.nodes.between, 0, rank, between)
            _check_axis(meshes.nodes.inside, 0, rank, inside)
            # ep ranks are numbered node by node, so each node has consecutive experts.
            node, local_rank = (
                meshes.nodes.between.get_local_rank(),
                meshes.nodes.inside.get_local_rank(),
            )
            assert meshes.ep_rank == node * meshes.nodes.inside.size() + local_rank


REFUSED_NODES = [
    (
        _make_hierarchical(4, ep_size=6),
        r"node_size \(4\) .* ranks 0, 1, 2, 3, 4, 5 into 4 \+ 2 ranks.*try node_size 1, 2, 3, 6,",
    ),
    (
        _make_hierarchical(3, ep_size=2),
        r"node_size \(3\) .* ranks 2, 3 into 1 \+ 1 ranks.*try node_size 1, 2, 4, 6,",
    ),
    (
        ParallelConfig(ep_size=6, dispatcher="hierarchical"),
        "neither node_size nor the launcher's LOCAL_WORLD_SIZE",
    ),
]


@pytest.mark.parametrize(("config", "match"), REFUSED_NODES)
def test_nodes_that_split_an_ep_group_unevenly_are_refused(
    config: ParallelConfig, match: str
) -> None:
    for rank in (0, 5):
        with _as_rank(rank, 6), pytest.raises(ValueError, match=match):
            build_meshes(config, CPU)


def test_groups_have_the_timeout_of_the_default_group() -> None:
    """torch gives new groups a timeout of 30 minutes, whatever timeout the default group has."""

    def list_timeouts(mesh: DeviceMesh) -> set[timedelta]:
        return {group._get_backend(CPU).options._timeout for group in mesh.get_all_groups()}

    timeout = timedelta(seconds=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        mesh = DeviceMesh.from_group(dist.new_group([0]), "cpu")
        assert timeout not in list_timeouts(mesh)
        take_default_timeout(mesh)
        assert list_timeouts(mesh) == {timeout}
        with warnings.catch_warnings(action="error"):
            meshes = build_meshes(ParallelConfig(), CPU)
        assert list_timeouts(meshes.dense) | list_timeouts(meshes.ep) == {timeout}
    finally:
        dist.destroy_process_group()


def test_groups_are_described_by_their_axis() -> None:
    """When a group times out, NCCL's watchdog prints the description of the group."""
    with _as_rank(0, 8):
        meshes = build_meshes(ParallelConfig(ep_size=2, sp_size=2, dp_replicate_size=2), CPU)
        described = {
            axis: mesh.get_group(axis).group_desc
            for mesh in (meshes.dense, meshes.ep_fsdp, meshes.ep, meshes.sp, meshes.experts)
            for axis in mesh.mesh_dim_names
        }
        axes = ("dp_replicate", "fsdp", "ep_fsdp", "ep", "sp", "ep_fsdp_ep")
        assert described == {axis: f"mesh_{axis}" for axis in axes}
        all_ranks = build_meshes(ParallelConfig(ep_size=8), CPU).ep.get_group()
        assert all_ranks.group_desc == "mesh_of_all_ranks"


def _count_new_groups(world: int, config: ParallelConfig) -> int:
    """Count the calls of torch's new_group on one rank."""
    with (
        _as_rank(world // 2, world),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as direct,
        mock.patch.object(device_mesh, "new_group", wraps=device_mesh.new_group) as by_meshes,
    ):
        build_meshes(config, CPU)
        return int(direct.call_count + by_meshes.call_count)


def test_only_the_rank_itself_creates_its_group_of_one() -> None:
    """A rank creates each ep group, each ep_fsdp group, and the groups of itself and of all ranks.

    torch alone would also create a group for each rank of the world.
    """
    assert _count_new_groups(64, ParallelConfig(ep_size=8)) == 64 // 8 + 8 + 1 + 1
    assert _count_new_groups(256, ParallelConfig(ep_size=8)) == 256 // 8 + 8 + 1 + 1
    assert _count_new_groups(64, ParallelConfig()) == 1 + 1
    # The rank creates data groups and sp groups. The ep group is the group of all ranks.
    assert _count_new_groups(64, ParallelConfig(ep_size=64, sp_size=4)) == 4 + 64 // 4 + 1 + 1
    assert _count_new_groups(1, ParallelConfig()) == 1


REFUSED = [
    (3, 1, 8, r"ep_size \(3\).*8 / 1 = 8.*try 1, 2, 4, 8,.*multiple of 3 processes"),
    (16, 1, 8, r"ep_size \(16\).*8 / 1 = 8.*try 1, 2, 4, 8,.*multiple of 16 processes"),
    (8, 2, 8, r"ep_size \(8\).*8 / 2 = 4.*try 1, 2, 4,.*multiple of 16 processes"),
    (1, 3, 8, r"dp_replicate_size \(3\).*world size \(8\); try 1, 2, 4, 8$"),
    (1, 16, 8, r"dp_replicate_size \(16\).*world size \(8\); try 1, 2, 4, 8$"),
    (2, 1, 1, r"ep_size \(2\).*1 / 1 = 1.*try 1,.*multiple of 2 processes"),
]


@pytest.mark.parametrize(("ep", "replicate", "world", "match"), REFUSED)
def test_sizes_that_do_not_divide_the_world_are_refused(
    ep: int, replicate: int, world: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        check_world(ParallelConfig(ep_size=ep, dp_replicate_size=replicate), world)
    with _as_rank(0, world), pytest.raises(ValueError, match=match):
        build_meshes(ParallelConfig(ep_size=ep, dp_replicate_size=replicate), CPU)


# name: (config, dispatch groups, etp groups, ep groups, ep_fsdp groups)
SHARED_EXPERTS: dict[str, tuple[ParallelConfig, Groups, Groups, Groups, Groups]] = {
    "docstring": (
        ParallelConfig(ep_size=2, etp_size=2),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "one ep rank": (
        ParallelConfig(etp_size=4),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        SINGLES,
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ),
    "ep_outside": (
        ParallelConfig(ep_size=2, etp_size=2, ep_outside=True),
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
    ),
    "all ranks, HSDP": (
        ParallelConfig(ep_size=2, etp_size=2, dp_replicate_size=2),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        SINGLES,
    ),
}


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_ranks_that_share_experts_have_the_expected_groups(name: str) -> None:
    config, *groups = SHARED_EXPERTS[name]
    for rank in range(8):
        with _as_rank(rank, 8):
            meshes = build_meshes(config, CPU)
            assert meshes.etp is not None and meshes.fit(config, CPU)
            assert not meshes.fit(replace(config, etp_size=None), CPU)
            for mesh, axis_groups in zip(
                (meshes.dispatch, meshes.etp, meshes.ep, meshes.ep_fsdp), groups, strict=True
            ):
                _check_axis(mesh, -1 % mesh.ndim, rank, axis_groups)
            assert meshes.etp_rank == meshes.dispatch.get_local_rank() % meshes.etp_size


def test_ep_times_etp_must_divide_the_ranks_of_a_replica() -> None:
    match = r"etp_size \(4\) times ep_size \(4\).*8 / 1 = 8.*ep_size 4 try etp_size 1, 2,.*16 proc"
    with pytest.raises(ValueError, match=match):
        check_world(ParallelConfig(ep_size=4, etp_size=4), 8)


def test_a_fake_group_leaves_no_mesh_in_the_cache_of_dtensor() -> None:
    """A later sum on an equal mesh would otherwise get the mesh of the destroyed group."""
    for _ in range(2):
        with fake_group(0, 4):
            mesh = init_device_mesh("cpu", (4,))
            tensor = DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0),))
            assert (tensor + tensor).device_mesh is mesh
