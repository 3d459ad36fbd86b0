"""benchmarks/muon.py counts the bytes that travel as its formula does."""

import muon as bench
import pytest

SIZES = bench.Sizes(hidden=32, intermediate=16, layers=1, experts=8, steps=1, bucket_bytes=4096)


@pytest.mark.slow
def test_bytes_are_those_of_the_formula() -> None:
    lines = bench.report(SIZES, 2, ["- machine"]).splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ep")]
    assert len(rows) == 3
    for _, _, _, sent, by_hand, level, _, _ in rows:
        assert float(sent) == float(by_hand) > 0
        assert float(level) < 1.5
