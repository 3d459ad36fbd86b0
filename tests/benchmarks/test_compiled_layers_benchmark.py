"""benchmarks/compiled_layers.py counts and plans the bytes of compiled layers, and times steps."""

import compiled_layers as bench
import pytest

SIZES = bench.Sizes(
    layer_tokens=128, layer_seq=64, tokens=64, seq=32, layers=1, ranks=2, steps=2, depth=3
)


@pytest.mark.slow
def test_eager_compiled_and_planned_bytes_are_counted() -> None:
    """With few tokens, most bytes are weights, so the ratio is closer to one than in the table."""
    eager, compiled, planned = bench.measure_bytes(SIZES)["none"]
    # Forward reads the weights of attention once, backward reads them twice and writes gradients.
    weights = 2 * 2048 * (4096 + 2 * 512 + 4096)
    assert 2 * weights / SIZES.layer_tokens < compiled < 0.9 * eager
    assert 0.8 < planned / compiled < 1.25


@pytest.mark.slow
def test_steps_and_compiling_are_timed() -> None:
    by_rank = bench.spawn(
        bench.measure_rank, SIZES.ranks, SIZES, timeout=400.0, environment=bench.KEEP_FREED_MEMORY
    )
    assert all(len(seconds) == SIZES.steps for seconds in by_rank[0].values())
    compiling = bench.measure_compiling(SIZES)
    assert all(seconds > 0 for seconds in compiling.values())
    sections = {
        "Bytes": bench.report_bytes({"none": (4000.0, 1000.0, 1100.0)}),
        "Compiling": bench.report_compiling(compiling),
        "A step": bench.report_step(SIZES, by_rank[0]),
    }
    text = bench.report(sections, ["- machine"])
    assert "| none | 4.0 | 1.0 | 0.250 | 1.10 |" in text
    assert text.count("\n## ") == 3 and "| seconds | " in text
