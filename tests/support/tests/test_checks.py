"""Each check of a shared spawn has its own result, even if another check fails, hangs or dies."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.ranks import RankError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def rank_times_ten(rank: int, world: int) -> int:
    return 10 * rank


def rank_one_raises_while_zero_waits(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("ep_size (3) must divide 8")
    dist.barrier()


def rank_zero_hangs(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(600)


def rank_one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


def sum_of_ranks(rank: int, world: int) -> tuple[float, float]:
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return total.item(), torch.rand(()).item()


def folder_is_shared_and_empty(rank: int, world: int, folder: str) -> list[str]:
    assert Path(folder).is_dir()
    dist.barrier()
    Path(folder, str(rank)).touch()
    dist.barrier()
    return sorted(file.name for file in Path(folder).iterdir())


def own_number(rank: int, world: int) -> int:
    return os.getpid()


def rank_one_dies_later(rank: int, world: int) -> None:
    if rank == 1:
        dist.destroy_process_group = lambda: os._exit(7)


def ranks_of_two_meshes(rank: int, world: int) -> list[str]:
    """Return the names of the groups of two equal meshes."""
    meshes = [init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b")) for _ in range(2)]
    for mesh in meshes:
        assert distribute_tensor(torch.ones(4), mesh["b"], [Shard(0)]).full_tensor().sum() == 4
    return [str(mesh.get_group("a").group_name) for mesh in meshes]


TABLE = (
    own_number,
    rank_times_ten,
    rank_one_raises_while_zero_waits,
    sum_of_ranks,
    rank_zero_hangs,
    rank_one_dies,
    folder_is_shared_and_empty,
)


def _named(**options: float) -> dict[str, Check]:
    checks = [parameter.values[0] for parameter in on_ranks(2, *TABLE, **options)]
    return {check.name: check for check in checks}


@pytest.mark.slow
def test_checks_after_a_failure_or_a_hang_still_run() -> None:
    checks = _named(timeout=5.0)  # the check that hangs takes all of this time
    found = Found(checks.values())
    by_name: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            by_name[name] = found.values(check)
        except (RankError, TimeoutError) as error:
            by_name[name] = error
    assert by_name["rank_times_ten"] == [0, 10]
    raised = by_name["rank_one_raises_while_zero_waits"]
    assert isinstance(raised, RankError) and "rank 1 of 2 raised ValueError" in str(raised)
    assert "in rank_one_raises_while_zero_waits" in str(raised), "no traceback"
    torch.manual_seed(0)
    assert by_name["sum_of_ranks"] == [(3.0, torch.rand(()).item())] * 2
    hung = by_name["rank_zero_hangs"]
    assert isinstance(hung, TimeoutError) and "ranks [0, 1] of 2 had not finished" in str(hung)
    assert "in rank_zero_hangs" in str(hung), "no stack of the rank that hangs"
    died = by_name["rank_one_dies"]
    assert isinstance(died, RankError) and "rank 1 of 2 raised ProcessDied: exit code 7" in str(
        died
    )
    assert by_name["folder_is_shared_and_empty"] == [["0", "1"]] * 2


@pytest.mark.slow
def test_checks_run_once_and_a_failed_check_fails_only_its_own_test() -> None:
    checks = _named()
    found = Found([checks[name] for name in ("own_number", "rank_one_dies", "rank_times_ten")])
    own_numbers = found.values(checks["own_number"])
    with pytest.raises(RankError, match="ProcessDied: exit code 7"):
        found.raise_if_failed(checks["rank_one_dies"])
    assert found.values(checks["rank_times_ten"]) == [0, 10]
    assert found._spawn is None, "the ranks run after the last check"
    assert found.values(checks["own_number"]) == own_numbers, "a check ran twice"


def test_ranks_that_die_after_the_last_check_fail_it() -> None:
    check = on_ranks(2, rank_one_dies_later)[0].values[0]
    with pytest.raises(RankError, match="ProcessDied: exit code 7"):
        Found([check]).raise_if_failed(check)


def test_checks_share_ranks_and_the_groups_of_meshes() -> None:
    checks = [parameter.values[0] for parameter in on_ranks(2, own_number, ranks_of_two_meshes)]
    later = Check("later", 2, ranks_of_two_meshes)
    found = Found([*checks, later])
    assert found.values(checks[0])[0] != found.values(checks[0])[1]
    first, again = found.values(checks[1]), found.values(later)
    assert first == again and len(set(first[0])) == 2


@pytest.mark.slow
def test_checks_of_different_worlds_do_not_share_a_spawn() -> None:
    two, four = (on_ranks(world, rank_times_ten)[0].values[0] for world in (2, 4))
    found = Found([two, four])
    assert found.values(four) == [0, 10, 20, 30] and found.values(two) == [0, 10]


@pytest.mark.parametrize("claim", on_ranks(2, rank_times_ten, folder_is_shared_and_empty))
def test_the_fixture_returns_the_values_of_each_check(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
    assert len(found.values(claim)) == 2


def test_skipped_checks_do_not_run() -> None:
    (parameter,) = on_ranks(2, rank_one_dies, skip="needs more")
    assert parameter.marks[0].kwargs == {"reason": "needs more"}
    assert Found([parameter.values[0]])._selected == []
