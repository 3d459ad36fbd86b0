"""benchmarks/mixers.py: divided mixers keep at most 0.30 of stock's activations at sp 4."""

import gc
from dataclasses import replace

import mixers as bench
import pytest
from support.architectures import MODEL_TYPES
from support.needs import SINCE_5_23

SIZES = bench.Sizes(seq=512, hidden=128, steps=1)
KINDS = {name: kind for name, kind in bench.KINDS.items() if kind.model_type in MODEL_TYPES}


@pytest.mark.slow
@pytest.mark.skipif(not SINCE_5_23, reason="mixers of older transformers get whole sequences")
@pytest.mark.parametrize("name", KINDS)
def test_a_rank_keeps_a_share_of_stocks_activations(name: str) -> None:
    """Over so few tokens, keys of the whole sequence are a large part of attention's memory."""
    methods = [method for method in KINDS[name].methods if method in bench.METHODS]
    found = {method: bench.measure_bytes(KINDS[name], method, SIZES) for method in methods}
    stock, gathered = found["stock"], found["gathered"]
    assert stock.sent == 0 and gathered.sent > 0
    assert gathered.activations == pytest.approx(stock.activations, rel=0.05)
    if not KINDS[name].is_divided:
        return
    divided = found["divided"]
    if KINDS[name].states:
        all_heads, states = (
            bench.measure_bytes(KINDS[name], method, SIZES) for method in bench.RECURRENCE_METHODS
        )
        assert states.activations < 0.6 * all_heads.activations, (states, all_heads)
        assert states.peak < all_heads.peak
    assert divided.sent > 0
    limit = 0.40 if "indexer" in name else 0.30
    assert divided.activations <= limit * stock.activations, found
    assert divided.peak < gathered.peak


@pytest.mark.skipif("KDA" not in KINDS, reason="this transformers has no Kimi-Linear")
def test_a_measured_model_is_freed() -> None:
    """No backward frees the graph, and the memory of all measurements would add up."""
    bench.measure_bytes(KINDS["KDA"], "stock", bench.Sizes(seq=64, hidden=32))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is bench.MixerWatch]


def test_the_table_has_a_row_for_each_method() -> None:
    measured = bench.Measured(2**20, 2**21, 1024)
    found = {"Mamba-2": {"stock": measured, "divided": replace(measured, activations=2**18)}}
    table = bench.report(SIZES, found, {"Mamba-2": {"stock": [1.0, 3.0]}}, ["- about"])
    assert (
        "`granitemoehybrid` | stock | 1.0 | 1.00 | 2.0 | 1.00 | 1 | 2.00 (1.00 .. 3.00) |" in table
    )
    assert "`granitemoehybrid` | divided | 0.2 | 0.25 | 2.0 | 1.00 | 1 | - |" in table
