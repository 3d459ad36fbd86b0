"""benchmarks/context_parallel.py shows that attention saves 1 / cp of stock's activations."""

from dataclasses import replace

import context_parallel as bench
import pytest

SIZES = bench.Sizes(seq=512, hidden=64, head_dim=16, steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", bench.METHODS[2:])
def test_a_rank_saves_its_share_of_stocks_activations(method: str) -> None:
    stock = bench.measure_bytes(SIZES, "stock")
    for cp in (2, 4):
        found = bench.measure_bytes(SIZES, method, cp)
        assert found.activations <= 1.1 / cp * stock.activations, (found, stock)
        assert found.sent == bench.count_key_value_bytes(SIZES, cp)
    assert bench.count_key_value_bytes(SIZES, 4) == 3 * 2 * 128 * 4 * 16 * 4


def test_the_tables_have_a_row_for_each_method_and_size() -> None:
    measured = bench.Measured(2**20, 2**21, 2**22)
    half = replace(measured, activations=2**19, peak=2**19)
    over_cp = {2: {"cp, gather": half, "cp, ring": measured}}
    found = {"stock": measured, "cp, ring": half}
    table = bench.report(SIZES, found, over_cp, {"stock": [1.0, 3.0]}, ["- about"])
    assert "| stock | 1.0 | 1.000 | 2.0 | 1.00 | 4.0 | 2.00 (1.00 .. 3.00) |" in table
    assert "| cp, ring | 0.5 | 0.500 | 0.5 | 0.25 | 4.0 | - |" in table
    assert "| 2 | 0.500 | 1.000 | 0.25 | 1.00 | 4.0 | 4.0 |" in table
