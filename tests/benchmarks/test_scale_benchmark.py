"""benchmarks/scale.py: the table by hand, and that what it counts is what it says."""

import pytest
import scale as bench


def _row(grown: int, dcp: bool) -> dict:
    return {
        "tensors": 3105,
        "sharding": (1.25, 30.4),
        "groups": 137,
        "groups of torch": 3208,
        "gathered": 5000 * grown,
        "agreed": 136,
        "planning": (0.5, 2.0),
        "by Accelerate": (0.4, 3.0),
        "told for it": 190 * grown,
        "dcp plan": {"planning": (9.0, 300.0), "gathered": 2**20 * grown} if dcp else None,
        "dcp": (14.0, 329.0) if dcp else None,
        "as saved": (0.04, 3.0, 1),
        "half": (0.05, 3.0, 2),
        "older": (1.0, 3.0, 8 * grown),
        "manifest": {"before": 2**21 * grown, "first": 9999, "another": 10_240},
    }


def test_the_table_by_hand() -> None:
    text = bench.report({8: _row(1, True), 64: _row(8, False)}, (3.0, 100.0, 36001))
    for line in (
        "| of one rank | 8 ranks | 64 ranks |",
        "| agreeing, before | 5,000 B | 0.04 MiB |",
        "| agreeing | 136 B | 136 B |",
        "| finding, before (headers alone) | 14.00 s, 329 MiB | not run |",
        "| finding and reading, half | 0.05 s, 3 MiB, 2 headers | 0.05 s, 3 MiB, 2 headers |",
        "| gathered for it, before (rank 0) | 1.00 MiB | not run |",
        "| planning by Accelerate (rank 0) | 0.40 s, 3 MiB | 0.40 s, 3 MiB |",
        "| told for it (rank 0) | 190 B | 1,520 B |",
        "hub: 36,001 tensors are found in 3.00 s, 100 MiB,",
    ):
        assert line in text, line


@pytest.mark.slow
def test_what_does_not_grow_with_the_number_of_ranks() -> None:
    """Two layers at 8 and 32 ranks: bytes, headers; DCP gathers a plan of every rank."""
    found = bench.run_all((8, 32), 2)
    # By hand: 4 ep groups, 8 of ep_fsdp, one rank's own; torch: three axes of one rank in 32 ranks
    assert (found[32]["groups"], found[32]["groups of torch"]) == (4 + 8 + 1, 4 + 8 + 3 * 32)
    small, large = found[8], found[32]
    assert small["agreed"] == large["agreed"] and large["gathered"] > 3.9 * small["gathered"]
    for row, world in ((small, 8), (large, 32)):
        # Rows of the last of half as many lie in two files, the last two.
        headers = [row[case][2] for case in ("as saved", "half", "older")]
        assert headers == [1, 2, 2]
        assert row["told for it"] < 200 * world
        assert row["tensors"] == small["tensors"]
    assert large["dcp plan"]["gathered"] > 3.9 * small["dcp plan"]["gathered"]
