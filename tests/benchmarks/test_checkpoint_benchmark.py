"""What benchmarks/checkpoint.py measures, and the promises of loading and saving that it checks."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoint as bench
import pytest
import torch
from ranks import spawn
from support.ranks import run_ranks
from torch import nn

MIB = bench.MIB
# 109 MiB; the largest tensor is 24 MiB, and a rank holds 27.
SIZES = bench.Sizes(hidden=256, layers=3, intermediate=192, vocab=512, repeats=1, ep=(2,))


def _watched(rank: int, world: int, file: str) -> list[bench.Figures]:
    def kept() -> Any:
        with bench.Watch() as watch:
            whole = torch.ones(64 * MIB // 4)
            part = whole[: 16 * MIB // 4].clone()
            time.sleep(0.1)  # peaks of less than a sample can be missed
            del whole
        return part, watch.figures(16 * MIB)

    def mapped() -> Any:
        with bench.Watch() as watch:
            tensor = torch.from_file(file, size=32 * MIB, dtype=torch.uint8)
            tensor.max()  # touches every page; sum would make int64 of it
        return tensor, watch.figures(0)

    def read() -> Any:
        with bench.Watch() as watch:
            data = Path(file).read_bytes()
        return data, watch.figures(32 * MIB)

    for watch in (kept, mapped, read):
        watch()  # brings in pages of torch's own libraries
    return [watch()[1] for watch in (kept, mapped, read)]


def test_peaks_are_told_apart_and_shards_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * 32 * MIB)
    ((kept, mapped, read),) = run_ranks(_watched, 1, str(tmp_path / "file"))
    for figures, peak, resident, num_read in (
        (kept, 64, 64, 0),
        (mapped, 0, 32, 32),
        (read, 0, 0, 32),
    ):
        assert abs(figures.peak / MIB - peak) < 2
        assert abs(figures.resident / MIB - resident) < 2
        assert abs(figures.read / MIB - num_read) < 2
        assert 0 < figures.seconds < 60


def _all_at_once(rank: int, *args: Any) -> bench.Measured:
    """A load and a save that hold the whole model."""

    def load(side: str, directory: str, ep: int) -> nn.Module:
        return bench_load("whole", directory, ep)

    def save(side: str, model: nn.Module, *args: Any) -> None:
        if "tiny" not in args[0]:
            state = [parameter.full_tensor() for parameter in model.parameters()]
            assert len(state) > 1
        bench_save(side, model, *args)

    bench_load, bench_save = bench.load, bench.save
    with mock.patch.object(bench, "load", load), mock.patch.object(bench, "save", save):
        return bench.measure_rank(rank, *args)


@pytest.mark.slow
def test_promises_hold_and_are_seen_to_break(tmp_path: Path) -> None:
    tiny, directory = f"{tmp_path}/tiny", f"{tmp_path}/model"
    for sizes, folder in ((bench.TINY, tiny), (SIZES, directory)):
        spawn(bench.write_model, 1, sizes, folder, timeout=200)
    assert any(".mlp.experts.63.gate_proj.weight" in key for key in bench.read_index(directory))
    arguments = SIZES, (tiny, directory)
    ranks = spawn(bench.measure_rank, 4, *arguments, f"{tmp_path}/ours", 2, "ours", timeout=200)
    bench.check_equal(directory, f"{tmp_path}/ours/model")
    total = sum(rank.shards for rank in ranks) / MIB
    assert 108 < total < 112
    for rank in ranks:
        assert abs(rank.load.read - rank.shards) < 2 * MIB, "a rank reads its shards alone"
        assert rank.load.resident < rank.load.peak + 4 * MIB, "nothing is mapped"
    results = {(2, "ours"): [ranks]}
    assert bench.broken(SIZES, results) == []
    # Two parts of a quarter, and what the heap keeps of the pieces.
    assert 0.2 < bench.worst(SIZES, results, "save") < 1.2
    ranks = spawn(_all_at_once, 4, *arguments, f"{tmp_path}/whole", 2, "ours", timeout=200)
    for rank in ranks:
        assert rank.load.peak > 2 * SIZES.largest and rank.save.peak > 2 * SIZES.largest
    problems = bench.broken(SIZES, {(2, "ours"): [ranks]})
    assert [problem.split(":")[0] for problem in problems] == ["load", "save"]


def test_a_checkpoint_that_differs_prints_no_figures(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "other")]
    for folder in folders:
        bench.write_model(0, bench.TINY, folder)
    bench.check_equal(*folders)
    file = next(Path(folders[1]).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"model\.\S+ was not saved as it was loaded"):
        bench.check_equal(*folders)


def test_the_tables_tell_rank_0_from_others_and_name_broken_promises(tmp_path: Path) -> None:
    largest = SIZES.largest

    def rank(load: float, save: float) -> bench.Measured:
        figures = [
            bench.Figures(2.0, int(x * largest), int(x * largest), MIB) for x in (load, save)
        ]
        return bench.Measured(3 * MIB, *figures)

    ours = [rank(0.5, 2.25), rank(0.25, 0.5), rank(0.25, 0.5), rank(0.25, 0.5)]
    results = {(2, "ours"): [ours], (2, "native"): [ours], (2, "whole"): [ours]}
    assert bench.broken(SIZES, results) == ["save: 2.25 of the largest tensor, promised 2.0"]
    table = bench.report(SIZES, results, ["- about"])
    load, save = (
        [line for line in table.splitlines() if line.startswith("| hf_moe_ep | 2 |")][i]
        for i in (0, 1)
    )
    assert load == (
        "| hf_moe_ep | 2 | 0.50 | 0.25 | 12.0 | 6.00 | 12.0 | 6.00 | 3.00 | 1.00 | 2.00 |"
    )
    assert save.startswith("| hf_moe_ep | 2 | 2.25 | 0.50 | 54.0 | 12.0 |")
    assert table.count("stock, then apply_ep_fsdp2") == 1, "it saves as ours does"
    bench.plot(SIZES, results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
