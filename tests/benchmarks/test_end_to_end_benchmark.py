"""benchmarks/end_to_end.py: both sides train alike, and a side that dies or hangs is a line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import end_to_end as bench
import pytest
import torch
from support.scripts import ROOT
from torch import nn

from hf_moe_ep.state import STATE

CELL = bench.Cell("ours", "full", replace(bench.TINY, length=16), steps=1)


def _line(cell: bench.Cell) -> dict[str, Any]:
    line: dict[str, Any] = {}
    bench.measure(cell, line.update)
    return {**cell.line(), **line}


@pytest.mark.parametrize("mode", bench.MODES)
def test_first_losses_are_those_of_stock(mode: str) -> None:
    """Full and with adapters; what ours keeps for backward is less than what stock does."""
    lines = [_line(replace(CELL, side=side, mode=mode)) for side in ("ours", "grouped_mm")]
    (compared,) = bench.compare(lines, torch.float32)
    assert compared["equal"] and len(compared["differences"]) == bench.COMPARED_STEPS
    assert lines[0]["losses"][0] > lines[0]["losses"][-1]
    assert lines[0]["kept_bytes_per_token"] < lines[1]["kept_bytes_per_token"]
    assert lines[0]["tokens"] == 2 * 16 and lines[0]["tok_per_s"] > 0
    lines[0]["losses"][2] *= 1.0001
    assert not bench.compare(lines, torch.float32)[0]["equal"]
    lines[0]["losses"][2] = float("nan")
    assert not bench.compare(lines, torch.float32)[0]["equal"]


def test_operations_of_a_token_by_hand() -> None:
    sizes = bench.TINY
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norms = 2 * sizes.hidden + 2 * sizes.head_dim
    attention = sizes.hidden * (2 * heads + 2 * kv)
    active = sizes.top_k * 3 * sizes.hidden * sizes.ffn
    layer = attention + norms + sizes.hidden * sizes.experts + active
    weights = sizes.layers * layer + sizes.hidden + sizes.vocab * sizes.hidden
    scores = sizes.layers * 6 * sizes.length * heads
    cell = replace(CELL, sizes=sizes)
    model = bench.build(cell, torch.device("cpu"))
    assert bench.model_flops(cell, model) == 6 * weights + scores
    model.requires_grad_(False)
    assert bench.model_flops(cell, model) == 4 * weights + scores


def _dies(cell: bench.Cell, note: Callable[[dict[str, Any]], None]) -> None:
    note({"build_s": 1.0})
    os._exit(9)


def _hangs(cell: bench.Cell, note: Callable[[dict[str, Any]], None]) -> None:
    note({"losses": [4.0]})
    time.sleep(600)


def _has_no_room(cell: bench.Cell, note: Callable[[dict[str, Any]], None]) -> None:
    note({"build_s": 1.0})
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("measure", "seconds", "want"),
    [
        (_dies, 60, {"build_s": 1.0, "error": "died with exit code 9"}),
        (_hangs, 15, {"losses": [4.0], "error": "stopped after 15 s"}),
        (_has_no_room, 60, {"build_s": 1.0, "error": "out of memory"}),
    ],
)
@pytest.mark.slow
def test_how_a_side_ended_is_in_its_line(
    measure: Callable[..., None], seconds: float, want: dict[str, Any]
) -> None:
    """Whatever it sent before is there too."""
    assert bench.in_own_process(CELL, seconds, measure) == want


def test_one_side_without_room_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No room is a result; a crash, or another loss, is exit code 1."""
    ends = {"ours": {"losses": [4.0, 3.0, 2.0]}, "grouped_mm": {"error": "out of memory"}}
    monkeypatch.setattr(bench, "in_own_process", lambda cell, seconds: ends[cell.side])
    cells = [replace(CELL, side=side) for side in ends]
    assert bench.run(cells, 1.0) == 0
    ends["grouped_mm"] = {"error": "died with exit code -9"}
    assert bench.run(cells, 1.0) == 1
    ends["grouped_mm"] = {"losses": [4.0, 3.1, 2.0]}
    assert bench.run(cells, 1.0) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["losses_of"] == "ours" and not last["equal"]


@pytest.mark.slow
def test_two_ranks_train_as_stock_under_fsdp2() -> None:
    """Losses of ours with ep 2 are those of stock with FSDP2 alone."""
    lines = []
    for side in ("ours", "grouped_mm"):
        cell = replace(CELL, side=side, ranks=2)
        lines.append({**cell.line(), **bench.of_ranks(cell, 200.0)})
    assert [line.get("error") for line in lines] == [None, None]
    (compared,) = bench.compare(lines, torch.float32)
    assert compared["equal"], compared
    assert lines[0]["tokens"] == 2 * 2 * 16


def test_ours_is_patched_and_stock_is_not() -> None:
    """What is measured is what its name says."""

    def patched_as(side: str) -> tuple[bool | None, str]:
        model: nn.Module = bench.build(replace(CELL, side=side), torch.device("cpu"))
        state = getattr(model, STATE, None)
        recompute = None if state is None else state.config.recompute_activations
        return recompute, model.config._experts_implementation

    assert patched_as("ours")[0] is False and patched_as("ours_recompute")[0] is True
    assert patched_as("grouped_mm") == (None, "grouped_mm")
    assert patched_as("eager") == (None, "eager")


@pytest.mark.slow
def test_no_import_touches_a_gpu() -> None:
    """Sides are forked from a process that has imported all this: CUDA must be theirs to open."""
    code = (
        "import torch\n"
        "def touched(*args, **kwargs):\n"
        "    raise AssertionError('an import touched CUDA')\n"
        "for name in ('_lazy_init', 'init', 'current_device', 'get_device_capability',\n"
        "             'get_device_properties', 'get_device_name', 'mem_get_info'):\n"
        "    assert hasattr(torch.cuda, name)\n"
        "    setattr(torch.cuda, name, touched)\n"
        "import importlib, end_to_end\n"
        "for name in end_to_end.PRELOADED:\n"
        "    importlib.import_module(name)\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)
