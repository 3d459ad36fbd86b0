"""The benchmark of gloo's workers: both sides have the workers that they claim, and one loss."""

import gloo_workers as bench
import pytest

SIZES = bench.Sizes(hidden=32, intermediate=16, layers=1, tokens=16, steps=1, turns=1)


@pytest.mark.slow
def test_both_sides_compute_the_same() -> None:
    taken = bench.measure(SIZES)
    assert [len(values) for values in taken.values()] == [1, 1]
    assert "| seconds of a step |" in bench.report(SIZES, taken, ["- machine"])
