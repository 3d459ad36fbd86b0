"""benchmarks/trainers.py: both sides train equally, and the table compares their times."""

from dataclasses import replace

import pytest
import trainers as bench

STEPS = 3


@pytest.mark.slow
def test_a_command_trains_equally_with_and_without_the_runner() -> None:
    """The benchmark raises an error if the losses differ, or if the wrong side is patched."""
    pytest.importorskip("trl", minversion="1.15")
    (pair,) = bench.measure("trl", {}, batch=4, steps=STEPS, pairs=1, timeout=200)
    for result in pair.values():
        assert len(result.steps) == STEPS - 1 and min(result.steps) > 0
        assert sum(result.steps) < result.whole and result.cpu_seconds > 0
        assert [entry["step"] for entry in result.entries] == [1, 2, 3]
        assert len({entry["loss"] for entry in result.entries}) > 1
    table = bench.report("trl", {}, 4, STEPS, [pair])
    ours, stock = pair["ours"].step, pair["stock"].step
    assert f"| step, s | {ours:.2f} | {stock:.2f} | {ours / stock:.2f} |" in table
    entries = [entry | {"loss": entry["loss"] * (1 + 1e-4)} for entry in pair["ours"].entries]
    with pytest.raises(RuntimeError, match=r"step 1: loss is .* with hf-moe-ep run and .* without"):
        bench.check_equal(pair | {"ours": replace(pair["ours"], entries=entries)})
