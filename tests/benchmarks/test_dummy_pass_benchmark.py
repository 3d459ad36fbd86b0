"""benchmarks/dummy_pass.py: only one of the three kinds of text-only steps runs the tower."""

import dummy_pass
import pytest
from ranks import spawn
from torch import nn

STEPS = 1


def _count_runs_of_tower(rank: int, steps: int) -> int:
    calls: list[int] = []
    build = dummy_pass.build

    def build_counting_model(frozen: bool) -> nn.Module:
        model = build(frozen)
        model.model.visual.register_forward_hook(lambda *_: calls.append(1))
        return model

    dummy_pass.build = build_counting_model
    seconds = dummy_pass.time_rank(rank, steps, frozen=False)
    assert {way: len(times) for way, times in seconds.items()} == {
        "bare": steps,
        "rests": steps,
        "dummy": steps,
    }
    return len(calls)


@pytest.mark.slow
def test_the_tower_runs_only_in_the_dummy_pass() -> None:
    runs = spawn(_count_runs_of_tower, dummy_pass.WORLD, STEPS, timeout=300.0)
    assert runs == [dummy_pass.WARMUP_STEPS + STEPS] * dummy_pass.WORLD
