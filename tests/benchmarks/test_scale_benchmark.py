"""benchmarks/scale.py: what it counts does not grow with the number of ranks."""

import pytest
import scale as bench


@pytest.mark.slow
def test_what_does_not_grow_with_the_number_of_ranks() -> None:
    """Two layers at 8 and 32 ranks. DCP gathers a plan of every rank."""
    found = bench.run_all((8, 32), 2)
    # By hand: 4 ep groups, 8 of ep_fsdp, one of one rank, one of all; torch: three axes of one
    # rank in each of 32 ranks.
    assert (found[32]["groups"], found[32]["groups of torch"]) == (4 + 8 + 1 + 1, 4 + 8 + 3 * 32)
    small, large = found[8], found[32]
    assert small["agreed"] == large["agreed"] and large["gathered"] > 3.9 * small["gathered"]
    for row, world in ((small, 8), (large, 32)):
        # Rows of the last of half as many lie in two files, the last two.
        headers = [row[case][2] for case in ("as saved", "half", "older")]
        assert headers == [1, 2, 2]
        assert row["told for it"] < 200 * world
        assert row["tensors"] == small["tensors"]
    assert "| of one rank | 8 ranks | 32 ranks |" in bench.report(found, (3.0, 100.0, 36001))
    assert large["dcp plan"]["gathered"] > 3.9 * small["dcp plan"]["gathered"]
