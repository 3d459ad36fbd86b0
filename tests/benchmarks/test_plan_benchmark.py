"""What the benchmark of plans says of seconds: order with ties, and the table."""

import math

import plan as bench
import pytest
import torch

from hf_moe_ep.tools.step_time import StepTime


def _times(*seconds: float) -> list[StepTime]:
    return [StepTime(one, 1.0, {"memory": one}) for one in seconds]


def test_order_with_ties() -> None:
    """Four configurations, quartiles of the middle two overlap: which is first does not matter."""
    measured = [[1.0, 1.1, 1.2], [2.0, 2.2, 2.4], [2.1, 2.3, 2.5], [9.0, 9.1, 9.2]]
    ranks = bench.ranks_of(measured)
    assert ranks.tolist() == [0.0, 1.5, 1.5, 3.0]
    for first, second in ((2.0, 3.0), (3.0, 2.0)):
        with_ties, without = bench.agreement(_times(1.0, first, second, 4.0), measured)
        # One of both ties is a rank too high, one too low: 4.5 / sqrt(4.5 * 5).
        assert with_ties == pytest.approx(math.sqrt(4.5 / 5))
        assert without == pytest.approx(1.0 if first < second else 0.8)
    assert bench.agreement(_times(4.0, 3.0, 2.0, 1.0), measured)[1] == pytest.approx(-1.0)
    assert math.isnan(bench.spearman(torch.ones(3), torch.arange(3.0)))
