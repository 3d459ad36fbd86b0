"""benchmarks/checkpoint.py measures peaks and resident memory separately, and prints tables."""

import time
from pathlib import Path
from typing import Any

import checkpoint as bench
import pytest
import torch
from support.ranks import run_ranks

MIB = bench.MIB
# The model has 109 MiB, its largest tensor 24 MiB, and a rank's shards 27 MiB.
SIZES = bench.Sizes(hidden=256, layers=3, intermediate=192, vocab=512, repeats=1, ep=(2,))


def _measure_actions(rank: int, world: int, file: str) -> list[bench.Figures]:
    def allocate() -> Any:
        with bench.Watch() as watch:
            whole = torch.ones(64 * MIB // 4)
            part = whole[: 16 * MIB // 4].clone()
            time.sleep(0.1)  # a peak shorter than the sampling interval can be missed
            del whole
        return part, watch.make_figures(16 * MIB)

    def map_file() -> Any:
        with bench.Watch() as watch:
            tensor = torch.from_file(file, size=32 * MIB, dtype=torch.uint8)
            tensor.max()  # reads every page; sum would allocate int64 values
        return tensor, watch.make_figures(0)

    def read_file() -> Any:
        with bench.Watch() as watch:
            data = Path(file).read_bytes()
        return data, watch.make_figures(32 * MIB)

    for action in (allocate, map_file, read_file):
        action()  # the first call also loads pages of torch's libraries
    return [action()[1] for action in (allocate, map_file, read_file)]


def test_peaks_exclude_shards_and_mapped_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * 32 * MIB)
    ((allocated, mapped, read),) = run_ranks(_measure_actions, 1, str(tmp_path / "file"))
    for figures, peak, resident, num_read in (
        (allocated, 64, 64, 0),
        (mapped, 0, 32, 32),
        (read, 0, 0, 32),
    ):
        assert abs(figures.peak / MIB - peak) < 2
        assert abs(figures.resident / MIB - resident) < 2
        assert abs(figures.read / MIB - num_read) < 2
        assert 0 < figures.seconds < 60


@pytest.mark.slow
def test_the_benchmark_measures_and_draws(tmp_path: Path) -> None:
    results = bench.measure(SIZES, timeout=400)
    assert set(results) == {(2, method) for method in bench.METHODS}
    assert bench.list_broken_promises(SIZES, results) == []
    for rank in results[2, "ours"][0]:
        assert abs(rank.load.read - rank.shards) < 2 * MIB, "a rank reads only its shards"
    assert "| hf_moe_ep | 2 |" in bench.format_report(SIZES, results, ["- machine"])
    bench.plot(SIZES, results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
