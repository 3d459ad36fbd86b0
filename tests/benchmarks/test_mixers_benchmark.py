"""benchmarks/mixers.py: divided mixers keep at most 0.30 of stock's activations at sp 4."""

from dataclasses import replace
from typing import Any

import mixers as bench
import pytest
from support.architectures import MODEL_TYPES
from support.ranks import run_ranks

SIZES = bench.Sizes(seq=512, hidden=128, steps=1)
KINDS = {name: kind for name, kind in bench.KINDS.items() if kind.model_type in MODEL_TYPES}


def _measure(rank: int, world: int, name: str) -> dict[str, bench.Measured]:
    return {way: bench.measure_rank(rank, KINDS[name], way, SIZES) for way in bench.WAYS}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_rank_keeps_a_share_of_stocks_activations(name: str) -> None:
    """Latent keys of all tokens are a part of attention's activations, so it keeps more."""
    for found in run_ranks(_measure, bench.WORLD, name, timeout=240.0):
        stock = found["stock"]
        assert stock.sent == 0 and found["gathered"].sent > 0 and found["divided"].sent > 0
        assert found["gathered"].activations == pytest.approx(stock.activations, rel=0.05)
        limit = 0.6 if "indexer" in name else 0.30
        assert found["divided"].activations <= limit * stock.activations, found
        assert found["divided"].peak < found["gathered"].peak


def test_the_table_has_a_row_for_each_way() -> None:
    measured = bench.Measured(2**20, 2**21, 1024, [1.0])
    found: dict[str, Any] = {
        "Mamba-2": {
            "stock": [measured],
            "divided": [replace(measured, activations=2**18), replace(measured, peak=2**20)],
        }
    }
    table = bench.report(SIZES, found, ["- about"])
    assert (
        "| Mamba-2 | `granitemoehybrid` | stock | 1.00 | 1.00 | 2.00 | 1.00 | 1 | 1.00 |" in table
    )
    assert "| divided | 0.62 (0.25 .. 1.00) | 1.00 | 1.50 (1.00 .. 2.00) | 1.00 | 1 |" in table
