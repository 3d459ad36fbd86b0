"""`run_ranks` returns values, reports errors, hangs and deaths, and ends all ranks in time."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankError, run_ranks, started_ranks


def _values(rank: int, world_size: int, scale: torch.Tensor) -> dict[str, object]:
    total = scale * (rank + 1)
    dist.all_reduce(total)
    fresh = eval("torch.empty(3)", {"__name__": "hf_moe_ep.moe.layer", "torch": torch})
    return {
        "total": total,
        "env": [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")],
        "threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
        "poisoned": bool(fresh.isnan().all()),
    }


def _one_raises_one_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("ep_size (3) must divide 8")
    dist.barrier()


def _all_but_the_last_raise(rank: int, world_size: int) -> torch.Tensor:
    if rank < world_size - 1:
        raise KeyError(f"rank {rank} says no")
    return torch.tensor([rank])


def _one_sleeps(rank: int, world_size: int, folder: Path) -> None:
    dist.barrier()
    (folder / "started").touch()
    if rank == 0:
        time.sleep(600)


def _one_dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)


def _one_aborts(rank: int, world_size: int) -> None:
    if rank == 0:
        os.abort()


def test_values_are_returned_in_rank_order() -> None:
    results = run_ranks(_values, 2, torch.tensor([1.0, 10.0]))
    for rank, result in enumerate(results):
        assert torch.equal(result["total"], torch.tensor([3.0, 30.0]))
        assert result["env"] == [str(rank), "2", str(rank)]
        assert result["threads"] == (1, "1")
        assert result["poisoned"]


def _imported(rank: int, world: int) -> bool:
    dist.barrier()  # a rank that ends while another one still connects would make it fail
    return "support.imported_once" in sys.modules


def test_ranks_are_forked_from_a_server_that_has_done_the_imports() -> None:
    assert run_ranks(_imported, 2) == [True, True]


def test_the_first_error_is_raised_with_rank_and_traceback() -> None:
    """The waiting rank is killed: its group's timeout is longer than that of `run_ranks`."""
    with pytest.raises(RankError, match=r"^rank 1 of 2 raised ValueError: ep_size \(3\)") as caught:
        run_ranks(_one_raises_one_waits, 2, group_timeout=1000.0)
    assert "in _one_raises_one_waits" in str(caught.value)


def test_expected_errors_are_returned_per_rank() -> None:
    first, second = run_ranks(_all_but_the_last_raise, 2, expect_errors=True)
    assert first == ("error", "KeyError", "'rank 0 says no'")
    assert second == ("ok", torch.tensor([1]))


@pytest.mark.slow
def test_a_hang_names_the_rank_and_the_line(tmp_path: Path) -> None:
    with started_ranks(_one_sleeps, 2, tmp_path) as ranks:
        ranks.wait(60, (tmp_path / "started").exists)
        with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 had not .* after 3 s") as caught:
            ranks.wait(3)
    assert "rank 0 stood at" in str(caught.value) and "in _one_sleeps" in str(caught.value)
    assert "rank 1: returned" in str(caught.value)


def test_a_dead_process_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 raised ProcessDied: exit code 7"):
        run_ranks(_one_dies, 2)
    with pytest.raises(RankError, match=r"rank 0 of 2 raised ProcessDied: exit code -6") as caught:
        run_ranks(_one_aborts, 2)
    assert "in _one_aborts" in str(caught.value)
