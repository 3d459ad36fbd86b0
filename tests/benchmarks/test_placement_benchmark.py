"""benchmarks/placement.py moves experts, evens out the load and changes no loss."""

import placement as bench
import pytest


def test_routes_have_one_busy_rank() -> None:
    ids = bench.draw_routes(512, rank=0).ids
    share = (ids < bench.EXPERTS // bench.WORLD).double().mean().item()
    assert 2.9 < share * bench.WORLD < 3.2


@pytest.mark.slow
def test_one_small_run() -> None:
    """The busiest rank's own work falls with its load. `measure` compares the losses of a pair."""
    sizes = bench.Sizes(tokens=256, pairs=3)
    found = bench.spawn(bench.measure, bench.WORLD, sizes, timeout=240)
    assert found[0].load["hub order"] > 2.8 and found[0].load["balanced"] <= bench.TARGET_LOAD
    hub, balanced = (min(bench.busiest_rank(found, side)) for side in bench.SIDES)
    assert balanced < hub
    assert max(one.moved_bytes for one in found) > 0
    assert "| busiest rank over the mean |" in bench.report(found, sizes)
