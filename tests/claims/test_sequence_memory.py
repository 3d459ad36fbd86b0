"""Sequence parallelism divides activations by sp, so that longer sequences fit in memory."""

import resource
from pathlib import Path

import pytest
import sequence as bench
import torch
from support.ranks import run_ranks

SHORT = bench.Sizes(seq=512, layers=2, steps=1)
LONG = bench.Sizes(seq=4096, layers=4)
# LONG has 317 MiB of activations on one rank and 83 MiB if it is split over 4 ranks. Buffers of
# collectives need memory too, and need more if other ranks are late.
CAP_MIB = 280


def _measure_activations(rank: int, world: int) -> dict[int, int]:
    return {sp: result.activations for sp, result in bench.measure_rank(rank, SHORT).items()}


@pytest.mark.slow
def test_activations_are_divided_by_sp() -> None:
    for saved in run_ranks(_measure_activations, bench.WORLD):
        for sp in (2, 4):
            assert 0.85 < saved[sp] * sp / saved[1] < 1.15, f"sp {sp}: {saved}"


def _run_step_with_memory_limit(rank: int, world: int, sp: int) -> float:
    """Return the loss of one step, in which this process may allocate only CAP_MIB more memory."""
    model, batch = bench.build(LONG, sp), bench.make_batch(LONG, sp)
    status = Path("/proc/self/status").read_text()
    used = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    limit = int(used) * 1024 + CAP_MIB * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


@pytest.mark.slow
def test_a_sequence_that_exceeds_memory_trains_if_it_is_split() -> None:
    outcomes = run_ranks(
        _run_step_with_memory_limit, bench.WORLD, 1, expect_errors=True, group_timeout=30.0
    )
    assert any("can't allocate memory" in outcome[2] for outcome in outcomes if outcome[0] != "ok")
    assert not any(outcome[0] == "ok" for outcome in outcomes)
    losses = run_ranks(_run_step_with_memory_limit, bench.WORLD, 4)
    assert len(set(losses)) == 1 and torch.tensor(losses).isfinite().all()
