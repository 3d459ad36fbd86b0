"""benchmarks/few_experts.py: with etp_size, no expert is gathered, but more rows are sent."""

import few_experts as bench
import pytest

SIZES = bench.Sizes(hidden=64, intermediate=256, experts=2, top_k=1, tokens=24, steps=1)


@pytest.mark.slow
def test_layouts_with_etp_gather_no_weights() -> None:
    lines = bench.report([SIZES]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    figures = {row[0]: row[1:] for row in rows if row and row[0].startswith(("ep ", "etp "))}
    assert list(figures) == ["ep 1", "ep 2", "ep 2 x etp 2", "etp 4"]
    held = {name: float(cells[2]) for name, cells in figures.items()}
    assert len(set(held.values())) == 1, "every layout holds a quarter on each rank"
    gathered = {name: float(cells[3]) / held[name] for name, cells in figures.items()}
    assert gathered["ep 2"] == pytest.approx(2, rel=0.1)
    assert gathered["ep 2 x etp 2"] == gathered["etp 4"] == 1
