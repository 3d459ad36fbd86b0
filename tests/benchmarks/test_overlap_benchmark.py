"""benchmarks/overlap.py: on a slow link, steps are shorter if transfers overlap computation."""

import statistics

import overlap as bench
import pytest
from support.close import FP32_INSIDE

SIZES = bench.Sizes(tokens=1024, layers=1, steps=4)


@pytest.mark.slow
@pytest.mark.usefixtures("usual_scheduling")
def test_losses_are_equal_and_a_slow_link_is_hidden() -> None:
    bench.over_nodes.namespaces.skip_without_namespaces()
    figures = bench.run(SIZES, "50mbit")
    serial = figures[bench.SERIAL]
    for kind in bench.OPTIONS:
        assert len(figures[kind]["seconds"]) == SIZES.steps
        for loss, other in zip(figures[kind]["loss"], serial["loss"], strict=True):
            assert abs(loss - other) <= FP32_INSIDE * abs(other)
    fastest = {kind: min(figures[kind]["seconds"]) for kind in bench.OPTIONS}
    assert fastest[bench.SHARED] < fastest[bench.SERIAL]
    assert figures[bench.AUTO]["chunks"][0] in (1, 2, 3, 4, 6, 8)
    text = bench.report(SIZES, {"50mbit": figures}, ["- machine"])
    assert text.count("| 50mbit |") == 1
    assert statistics.median(serial["seconds"]) > 0
