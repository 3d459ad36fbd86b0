"""benchmarks/preferences.py: both sides have equal losses, and the table has both sides."""

import preferences as bench
import pytest

SIZES = bench.Sizes(
    pairs=1, seq=16, hidden=32, layers=2, experts=8, top_k=2, intermediate=32, vocab=64, rounds=2
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::FutureWarning")
def test_both_sides_have_equal_losses() -> None:
    pytest.importorskip("trl", minversion="1.16")
    ranks = bench.measure(SIZES, timeout=200)
    assert bench.check_equal(ranks) <= bench.TOLERANCE
    for measured in ranks:
        assert set(measured.losses) == {(a, b) for a in bench.SIDES for b in bench.STEPS}
        assert all(len(seconds) == SIZES.rounds for seconds in measured.seconds.values())
        assert abs(measured.losses["ours", "DPO"] - measured.losses["ours", "SFT"]) > 0.1
    text = bench.report(SIZES, ranks, ["- about"])
    assert text.count("| ours |") == text.count("| stock FSDP2 |") == 1
