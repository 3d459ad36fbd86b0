"""benchmarks/stages.py: both sides train the same rows, and stages send what is counted by hand."""

import pytest
import stages as bench
from ranks import spawn
from support.close import FP32_INSIDE

SIZES = bench.Sizes(
    tokens=128, seq=16, hidden=32, intermediate=8, experts=8, top_k=2, layers=2, steps=2
)


@pytest.mark.slow
def test_the_bytes_of_the_bubble_table() -> None:
    for stages, count in ((2, 3), (3, 4)):
        ranks = spawn(bench.waits_of_rank, stages, stages, count, 0.005, timeout=100)
        assert [rank.sent for rank in ranks] == [rank.by_hand for rank in ranks]
        assert all(0 < rank.part < 1 for rank in ranks)


@pytest.mark.slow
def test_both_sides_have_equal_losses_and_stages_send_less() -> None:
    if bench.namespaces.WHY_NOT:
        pytest.skip(bench.namespaces.WHY_NOT)
    script = bench.__file__
    assert script is not None
    figures = bench.over_nodes.run(script, SIZES, num_nodes=2, num_ranks=4, rate="1gbit")
    ours, theirs = (figures[name] for name in bench.LAYOUTS)
    # The loss of a data rank is the mean of its rows, and both start with the same weights.
    assert len(ours["loss"]) == SIZES.steps
    for loss, other in zip(ours["loss"], theirs["loss"], strict=True):
        assert abs(loss - other) <= 0.1 * abs(other) + FP32_INSIDE
    assert max(ours["sent"]) < min(theirs["sent"])
