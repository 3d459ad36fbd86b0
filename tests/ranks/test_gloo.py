"""The gloo groups of this package have one worker thread each, and share their network thread.

`upstream/gloo.py` describes the data race of two worker threads.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from support.ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_moe_ep import ParallelConfig
from hf_moe_ep.ranks.mesh import build_meshes
from hf_moe_ep.upstream.gloo import one_worker_thread

CPU = torch.device("cpu")
# The layouts have one rank, two ranks on an ep or sp axis, and four ranks on two axes.
LAYOUTS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(ep_size=2)),
    (2, ParallelConfig(sp_size=2)),
    (4, ParallelConfig(ep_size=2, dp_replicate_size=2)),
]

_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
# In this script one rank gathers as DTensor does, for some seconds. The race is more likely if
# several processes run it at the same time.
GATHERS = """
import contextlib, sys, time
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from hf_moe_ep.upstream.gloo import one_worker_thread

torch.set_num_threads(1)
with one_worker_thread() if sys.argv[1] == "one" else contextlib.nullcontext():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
name, ones = dist.group.WORLD.group_name, torch.ones(4)
operators = torch.ops._c10d_functional
ends_at = time.monotonic() + float(sys.argv[2])
while time.monotonic() < ends_at:
    for _ in range(200):
        started = [operators.all_gather_into_tensor(ones, 1, name) for _ in range(4)]
        for gathered in started:
            operators.wait_tensor(gathered)
print("ended", flush=True)
"""

# Two forked ranks meet after their parent had a group. They have no copy of its network thread.
FORKS = """
import multiprocessing, sys
import torch
import torch.distributed as dist
from hf_moe_ep.upstream.gloo import one_worker_thread

torch.set_num_threads(1)

def meet(store, rank, size):
    with one_worker_thread():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert total == size

def meet_in_file(rank):
    meet(dist.FileStore(sys.argv[1], 2), rank, 2)

meet(dist.HashStore(), 0, 1)
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=meet_in_file, args=(rank,), daemon=True) for rank in range(2)]
for process in ranks:
    process.start()
for process in ranks:
    process.join(60)
print([process.exitcode for process in ranks])
"""


def _count_threads(group: dist.ProcessGroup) -> int:
    workers: int = group._get_backend(CPU).options._threads
    return workers


def _count_by_group(rank: int, world_size: int, config: ParallelConfig) -> dict[str, int]:
    """Count the worker threads of the groups of meshes.

    The default group is created again as users create it, with two workers.
    """
    dist.barrier()  # a faster rank would close connections that other ranks still open
    store = dist.PrefixStore("stock", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    meshes = build_meshes(config, CPU)
    assert dist.group.WORLD is not None
    counts = {"default": _count_threads(dist.group.WORLD)}
    for mesh in (meshes.dense, meshes.ep_fsdp, meshes.ep, meshes.sp):
        for axis in mesh.mesh_dim_names or ():
            counts[axis] = _count_threads(mesh.get_group(axis))
    # The all-gather of a DTensor uses groups of the mesh, not the user's group.
    whole = torch.arange(float(8 * world_size))
    placements = [Replicate()] * (meshes.dense.ndim - 1) + [Shard(0)]
    gathered = distribute_tensor(whole, meshes.dense, placements).full_tensor()
    assert torch.equal(gathered, whole)
    dist.barrier()
    return counts


@pytest.mark.parametrize(("world_size", "config"), LAYOUTS)
def test_groups_of_meshes_have_one_worker(world_size: int, config: ParallelConfig) -> None:
    for counts in run_ranks(_count_by_group, world_size, config):
        assert counts.pop("default") == 2
        assert set(counts.values()) == {1}, counts


def _count_of_world(rank: int, world_size: int) -> int:
    dist.barrier()
    assert dist.group.WORLD is not None
    return _count_threads(dist.group.WORLD)


def test_ranks_of_the_tests_have_one_worker() -> None:
    assert run_ranks(_count_of_world, 2) == [1, 1]


def _count_network_threads(rank: int, world_size: int, config: ParallelConfig) -> int:
    build_meshes(config, CPU)
    dist.barrier()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="this torch gives the thread no name"
)
@pytest.mark.parametrize(("world_size", "config"), LAYOUTS)
def test_groups_share_a_network_thread(world_size: int, config: ParallelConfig) -> None:
    """Each such thread wakes up every 10 ms."""
    assert run_ranks(_count_network_threads, world_size, config) == [1] * world_size


def test_forked_ranks_have_their_own_network_thread(tmp_path: Path) -> None:
    words = [sys.executable, "-c", FORKS, str(tmp_path / "store")]
    ended = subprocess.run(words, env=_ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert ended.stdout == "[0, 0]\n", ended.stderr


@pytest.mark.parametrize(
    ("interface", "exists"), [("lo", True), ("lo,lo", True), ("no-such-interface", False)]
)
def test_gloo_uses_the_interface_of_the_environment(
    interface: str, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    stock = dist.distributed_c10d.ProcessGroupGloo
    try:
        with one_worker_thread():
            if exists:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                assert dist.group.WORLD is not None
                devices = dist.group.WORLD._get_backend(CPU).options._devices
                assert len(devices) == len(interface.split(","))
            else:
                with pytest.raises(RuntimeError, match=interface):
                    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert dist.distributed_c10d.ProcessGroupGloo is stock


def _run_four_at_once(kind: str, seconds: float) -> list[tuple[int, str]]:
    """Return the exit code and the errors of four processes that gather at the same time."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", GATHERS, kind, str(seconds)],
            env=_ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    ends_at = time.monotonic() + seconds + 120
    ended = []
    for process in running:
        _, errors = process.communicate(timeout=max(1.0, ends_at - time.monotonic()))
        ended.append((process.returncode, errors))
    return ended


@pytest.mark.slow
def test_groups_with_one_worker_do_not_crash() -> None:
    ended = _run_four_at_once("one", 25)
    assert [code for code, _ in ended] == [0] * 4, ended


@pytest.mark.slow
def test_stock_groups_crash() -> None:
    """If this fails, torch has fixed the race, and upstream/gloo.py can be removed."""
    ended = _run_four_at_once("stock", 25)
    assert any(code < 0 for code, _ in ended), ended
