"""benchmarks/scale.py: the traffic of a rank does not grow with the number of ranks."""

import pytest
import scale as bench


@pytest.mark.slow
def test_8_and_32_ranks_have_equal_traffic_per_rank() -> None:
    """torch's DCP gathers a plan of every rank, so its traffic grows with the number of ranks."""
    results = bench.run_all((8, 32), 2)
    # By hand, there are 4 groups of ep, 8 of ep_fsdp, one of one rank and one of all ranks. On each
    # of three axes of size 1, torch creates a group for each of 32 ranks.
    assert (results[32]["groups"], results[32]["groups of torch"]) == (
        4 + 8 + 1 + 1,
        4 + 8 + 3 * 32,
    )
    small, large = results[8], results[32]
    assert small["agreed"] == large["agreed"] and large["gathered"] > 3.9 * small["gathered"]
    for row, world in ((small, 8), (large, 32)):
        # If half as many ranks load, the rows of the last rank are in the last two files.
        assert [row[case][2] for case in ("as saved", "half")] == [1, 2]
        assert row["told for it"] < 200 * world
        assert row["tensors"] == small["tensors"]
    assert "| of one rank | 8 ranks | 32 ranks |" in bench.report(results, (3.0, 100.0, 36001))
    assert large["dcp plan"]["gathered"] > 3.9 * small["dcp plan"]["gathered"]
