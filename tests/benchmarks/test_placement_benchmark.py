"""benchmarks/placement.py moves experts, which balances the load and changes no loss."""

import placement as bench
import pytest


def test_drawn_routes_give_one_rank_three_times_the_mean_load() -> None:
    ids = bench.draw_routes(512, rank=0).ids
    share = (ids < bench.EXPERTS // bench.WORLD).double().mean().item()
    assert 2.9 < share * bench.WORLD < 3.2


@pytest.mark.slow
def test_the_busiest_rank_is_faster_with_balanced_experts() -> None:
    """`measure` raises if the losses of both sides differ."""
    sizes = bench.Sizes(tokens=256, pairs=3)
    results = bench.spawn(bench.measure, bench.WORLD, sizes, timeout=240)
    assert results[0].load["hub order"] > 2.8 and results[0].load["balanced"] <= bench.TARGET_LOAD
    hub, balanced = (min(bench.find_busiest_seconds(results, side)) for side in bench.SIDES)
    assert balanced < hub
    assert max(rank.moved_bytes for rank in results) > 0
    assert "| busiest rank over the mean |" in bench.report(results, sizes)
