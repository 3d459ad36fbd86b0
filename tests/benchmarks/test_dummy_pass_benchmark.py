"""The benchmark of text-only steps: each way runs the tower as often as it says."""

import dummy_pass
import pytest
from ranks import spawn
from torch import nn

STEPS = 1


def _runs_of_the_tower(rank: int, steps: int) -> int:
    runs: list[int] = []
    build = dummy_pass.build

    def counted(frozen: bool) -> nn.Module:
        model = build(frozen)
        model.model.visual.register_forward_hook(lambda *_: runs.append(1))
        return model

    dummy_pass.build = counted
    seconds = dummy_pass.timed_rank(rank, steps, frozen=False)
    assert {way: len(times) for way, times in seconds.items()} == {
        "bare": steps,
        "rests": steps,
        "dummy": steps,
    }
    return len(runs)


@pytest.mark.slow
def test_the_tower_runs_in_the_way_that_is_named_for_it_alone() -> None:
    runs = spawn(_runs_of_the_tower, dummy_pass.WORLD, STEPS, timeout=300.0)
    assert runs == [dummy_pass.WARMUP_STEPS + STEPS] * dummy_pass.WORLD
