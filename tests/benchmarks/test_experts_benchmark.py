"""benchmarks/experts.py times every implementation of one small layer and prints its rows."""

import experts as bench
import torch


def test_every_implementation_is_measured_and_printed() -> None:
    shape, names = bench.Shape("tiny", 4, 2, 32, 16), ["ours", "eager", "grouped_mm"]
    rows = bench.measure(shape, 24, names, 2, torch.device("cpu"), torch.float32)
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.checked and not row.error and len(row.both) == 2
        assert f"| tiny | 24 | {row.name} |" in bench.format_table_row(row, rows[0])
