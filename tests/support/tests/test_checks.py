"""Each check of a shared spawn has its own result, even if another check fails, hangs or dies."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks, run_checks
from support.ranks import RankError


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


TABLE = (
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
    outcomes = run_checks(list(checks.values()))
    by_name = {name: outcomes[check] for name, check in checks.items()}
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
def test_selected_checks_run_once_and_a_failed_check_fails_only_its_own_test() -> None:
    checks = _named()
    selected = [checks[name] for name in ("rank_times_ten", "rank_one_dies", "sum_of_ranks")]
    found = Found(selected)
    with pytest.raises(RankError, match="ProcessDied: exit code 7"):
        found.raise_if_failed(checks["rank_one_dies"])
    assert found._outcomes.keys() == set(selected), "the first call did not run all checks"
    found.raise_if_failed(checks["sum_of_ranks"])
    assert found.values(checks["rank_times_ten"]) == [0, 10]


@pytest.mark.slow
def test_checks_of_different_worlds_do_not_share_a_spawn() -> None:
    two, four = (on_ranks(world, rank_times_ten)[0].values[0] for world in (2, 4))
    with pytest.raises(AssertionError, match="cannot share"):
        run_checks([two, four])
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
