"""benchmarks/stages.py: both sides train the same rows, and bytes and waits equal the formulas."""

import pytest
import stages as bench
from ranks import spawn
from support.close import FP32_INSIDE

from hf_moe_ep.pipeline.schedule import compute_bubble

SIZES = bench.Sizes(
    tokens=128, seq=16, hidden=32, intermediate=8, experts=8, top_k=2, layers=2, steps=2
)


@pytest.mark.slow
def test_the_bubble_equals_the_formula() -> None:
    """The waits differ from the formula by at most 10 %, and the bytes equal a count by hand."""
    for stages, count in ((2, 3), (3, 4)):
        ranks = spawn(bench.measure_waits, stages, stages, count, 0.2, timeout=200)
        assert [rank.sent for rank in ranks] == [rank.by_hand for rank in ranks]
        waited = sum(rank.part for rank in ranks) / stages
        assert waited == pytest.approx(compute_bubble(stages, count), rel=0.1)


@pytest.mark.slow
def test_both_sides_have_equal_losses_and_stages_send_less() -> None:
    bench.namespaces.skip_without_namespaces()
    script = bench.__file__
    assert script is not None
    figures = bench.over_nodes.run(script, SIZES, num_nodes=2, num_ranks=4, rate="1gbit")
    ours, theirs = (figures[name] for name in bench.LAYOUTS)
    # The loss of a data rank is the mean over its rows. Both models start with the same weights.
    assert len(ours["loss"]) == SIZES.steps
    for loss, other in zip(ours["loss"], theirs["loss"], strict=True):
        assert abs(loss - other) <= 0.1 * abs(other) + FP32_INSIDE
    assert max(ours["sent"]) < min(theirs["sent"])
