"""benchmarks/long_sequences.py: the plan of a model with delta nets predicts a step on 4 ranks."""

import long_sequences as bench
import plan
import pytest
from support.ranks import run_ranks


def _measure(rank: int, world: int) -> list[plan.Measured]:
    return plan.measure_rank(rank, bench.Small(), bench.SMALL_LAYOUTS)


@pytest.mark.slow
def test_a_plan_with_sequence_parallelism_is_within_5_percent() -> None:
    """With a larger sp_size, a rank's peak is smaller, as planned."""
    measured = run_ranks(_measure, bench.WORLD, timeout=240.0)
    peaks = []
    for index, layout in enumerate(bench.SMALL_LAYOUTS):
        largest = max(rank[index].peak for rank in measured)
        planned = layout.planned(bench.Small(), load=measured[0][index].load).peak
        assert abs(planned / largest - 1) <= 0.05, f"{layout.name}: {planned}, {largest}"
        peaks.append(largest)
    assert peaks[0] > 1.5 * peaks[1] > 2 * peaks[2]
