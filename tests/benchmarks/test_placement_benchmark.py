"""benchmarks/placement.py: what its table says, and that it moves experts and changes no loss."""

import placement as bench
import pytest


def _measured(own: float, bytes_: int) -> bench.Measured:
    seconds = {"hub order": [2.0, 4.0], "balanced": [1.0, 2.0]}
    work = {"hub order": [2 * own, 2 * own], "balanced": [own, 1.8 * own]}
    load = {"hub order": 3.0, "balanced": 1.05}
    return bench.Measured(load, seconds, work, 1e-7, 0.5, bytes_)


def test_the_table_by_hand() -> None:
    text = bench.report([_measured(1.0, 2**20), _measured(0.5, 2**21)], bench.Sizes(pairs=2))
    assert "| busiest rank over the mean | 1.050 | 3.00 | 0.35 |" in text
    assert "| wall, seconds | 1.50 (1.00 .. 2.00) | 3.00 (2.00 .. 4.00) | 0.50 |" in text
    assert "Wall, seconds: 0.50 of hub order, at most 0.8." in text
    assert "Own work, cpu seconds: 0.70 (0.50 .. 0.90) of hub order, at most 0.8." in text
    assert "The busiest rank is at most 1.15 of the mean." in text
    assert "To move: 0.50 s, at most 2.0 MiB from a rank" in text


def test_routes_have_one_busy_rank() -> None:
    ids = bench.draw_routes(512, rank=0).ids
    share = (ids < bench.EXPERTS // bench.WORLD).double().mean().item()
    assert 2.9 < share * bench.WORLD < 3.2


@pytest.mark.slow
def test_one_small_run() -> None:
    """The busiest rank's own work falls with its load; the losses of a pair are compared inside."""
    sizes = bench.Sizes(tokens=256, pairs=3)
    found = bench.spawn(bench.measure, bench.WORLD, sizes, timeout=240)
    assert found[0].load["hub order"] > 2.8 and found[0].load["balanced"] <= bench.TARGET_LOAD
    hub, balanced = (min(bench.busiest_rank(found, side)) for side in bench.SIDES)
    assert balanced < hub
    assert max(one.moved_bytes for one in found) > 0
