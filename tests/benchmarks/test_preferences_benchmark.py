"""benchmarks/preferences.py: both sides compute one loss, and the table divides DPO by SFT."""

import preferences as bench
import pytest

SIZES = bench.Sizes(
    pairs=1, seq=16, hidden=32, layers=2, experts=8, top_k=2, intermediate=32, vocab=64, rounds=2
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::FutureWarning")
def test_it_measures_two_equal_sides() -> None:
    pytest.importorskip("trl", minversion="1.16")
    ranks = bench.measure(SIZES, timeout=200)
    assert bench.check_equal(ranks) <= bench.TOLERANCE
    for measured in ranks:
        assert set(measured.losses) == {(a, b) for a in bench.SIDES for b in bench.STEPS}
        assert all(len(taken) == SIZES.rounds for taken in measured.seconds.values())
        assert abs(measured.losses["ours", "DPO"] - measured.losses["ours", "SFT"]) > 0.1
    text = bench.report(SIZES, ranks, ["- about"])
    assert text.count("| ours |") == text.count("| stock FSDP2 |") == 1


def _measured(loss: float) -> bench.Measured:
    places = [(side, step) for side in bench.SIDES for step in bench.STEPS]
    seconds = dict(zip(places, ([3.0, 6.0], [2.0, 3.0], [8.0, 8.0], [4.0, 4.0]), strict=True))
    losses = dict.fromkeys(places, 1.0) | {("ours", "DPO"): loss}
    return bench.Measured(seconds, losses)


def test_the_table_divides_dpo_by_sft() -> None:
    text = bench.report(SIZES, [_measured(1.0)], ["- about"])
    assert "| ours | 4.50 (3.00 .. 6.00) | 2.50 (2.00 .. 3.00) | 1.75 (1.50 .. 2.00) |" in text
    assert "| stock FSDP2 | 8.00 | 4.00 | 2.00 |" in text
    assert "| ours / stock FSDP2 | 0.56 | | |" in text


def test_losses_that_differ_print_no_figures() -> None:
    with pytest.raises(RuntimeError, match=r"disagree on the DPO loss of rank 1: 1\.001 and 1\.0"):
        bench.check_equal([_measured(1.0), _measured(1.001)])
