"""benchmarks/gloo_workers.py measures both sides, and `measure` checks workers and losses."""

import gloo_workers as bench
import pytest

SIZES = bench.Sizes(hidden=32, intermediate=16, layers=1, tokens=16, steps=1, turns=1)


@pytest.mark.slow
def test_both_sides_are_measured() -> None:
    seconds = bench.measure(SIZES)
    assert [len(values) for values in seconds.values()] == [1, 1]
    assert "| seconds of a step |" in bench.report(SIZES, seconds, ["- machine"])
