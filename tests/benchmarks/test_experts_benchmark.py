"""What benchmarks/experts.py does with a shape that fails: a row that says so, and the others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import experts as bench
import pytest
import torch
from support.scripts import ROOT
from torch import Tensor

SHAPE = bench.Shape("tiny", 4, 2, 32, 16)
NAMES = ["ours", "eager", "grouped_mm"]
_FORWARD = bench.Problem.forward


def _measured(only: list[str] = NAMES) -> dict[str, bench.Row]:
    rows = bench.measure(SHAPE, 24, only, 2, torch.device("cpu"), torch.float32)
    return {row.name: row for row in rows}


def _fails(monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]) -> None:
    def forward(problem: bench.Problem, name: str) -> Tensor:
        out = _FORWARD(problem, name)
        return broken[name](out) if name in broken else out

    monkeypatch.setattr(bench.Problem, "forward", forward)


def _no_room(out: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def test_an_implementation_without_room_is_a_row_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that runs out of memory is a row; what remains is timed and compared with the next."""
    _fails(monkeypatch, {"eager": _no_room})
    rows = _measured()
    assert rows["eager"].error == bench.OUT_OF_MEMORY and not rows["eager"].failed
    assert "| tiny | 24 | eager | out of memory | - |" in bench.table_row(rows["eager"], None)
    for name in ("ours", "grouped_mm"):
        assert not rows[name].error and rows[name].checked
        assert len(rows[name].forward) == len(rows[name].both) == 2 and rows[name].saved
    assert rows["eager"].line()["error"] == bench.OUT_OF_MEMORY


def test_wrong_numbers_are_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong implementation gets no milliseconds; one with nothing to compare is marked so."""
    _fails(monkeypatch, {"ours": lambda out: 1.001 * out})
    rows = _measured()
    assert rows["ours"].failed and not rows["ours"].forward
    assert "tensor 0 is off by 1.0e-03 > 1e-05" in rows["ours"].error
    assert not rows["eager"].error and len(rows["eager"].both) == 2
    _fails(monkeypatch, {"eager": _no_room, "grouped_mm": _no_room})
    rows = _measured()
    assert rows["ours"].both and not rows["ours"].checked
    assert "ours (unchecked)" in bench.table_row(rows["ours"], rows["ours"])


def test_nothing_but_the_layer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """How ours is computed is found before the clock runs, once for all repeats."""
    asked = []
    choose = bench.choose_compute
    monkeypatch.setattr(bench, "choose_compute", lambda *a, **k: asked.append(a) or choose(*a, **k))
    assert _measured(["ours", "eager"])["ours"].both
    assert len(asked) == 1


@pytest.mark.slow
def test_the_table_is_on_disk_before_the_next_shape(tmp_path: Path) -> None:
    """A run that dies in its second shape leaves the first one's table."""
    script = (
        "import sys, os, experts as bench\n"
        "sizes = [bench.Shape('first', 4, 2, 32, 16), bench.Shape('second', 4, 2, 32, 16)]\n"
        "bench.CPU_SHAPES[:] = sizes\n"
        "measure = bench.measure\n"
        "bench.measure = lambda x, *a: os._exit(7) if x is sizes[1] else measure(x, *a)\n"
        f"sys.argv[1:] = ['--repeats', '1', '--tokens', '24', '--write', {str(tmp_path)!r}]\n"
        "bench.main()\n"
    )
    path = f"{ROOT}:{ROOT}/benchmarks"
    ended = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": path}, check=False, timeout=240
    )
    assert ended.returncode == 7
    table = (tmp_path / "experts-cpu.md").read_text()
    assert "| first | 24 | ours |" in table and "second" not in table
