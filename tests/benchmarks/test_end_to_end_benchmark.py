"""benchmarks/end_to_end.py: both sides have equal losses, and FLOPs equal a count by hand."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import end_to_end as bench
import pytest
import torch
from support.scripts import ROOT

CELL = bench.Cell("ours", "full", replace(bench.TINY, length=16), steps=1)


def _measure_line(cell: bench.Cell) -> dict[str, Any]:
    line: dict[str, Any] = {}
    bench.measure(cell, line.update)
    return {**cell.line(), **line}


@pytest.mark.parametrize("mode", bench.MODES)
def test_the_first_losses_equal_stocks_losses(mode: str) -> None:
    lines = [_measure_line(replace(CELL, side=side, mode=mode)) for side in ("ours", "grouped_mm")]
    (compared,) = bench.compare(lines, torch.float32)
    assert compared["equal"] and len(compared["differences"]) == bench.COMPARED_STEPS
    assert lines[0]["losses"][0] > lines[0]["losses"][-1]
    assert lines[0]["kept_bytes_per_token"] < lines[1]["kept_bytes_per_token"]
    assert lines[0]["tokens"] == 2 * 16 and lines[0]["tok_per_s"] > 0


def test_flops_of_a_token_equal_a_count_by_hand() -> None:
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
    assert bench.count_model_flops(cell, model) == 6 * weights + scores
    model.requires_grad_(False)
    assert bench.count_model_flops(cell, model) == 4 * weights + scores


@pytest.mark.slow
def test_two_ranks_train_as_stock_under_fsdp2() -> None:
    lines = []
    for side in ("ours", "grouped_mm"):
        cell = replace(CELL, side=side, ranks=2)
        lines.append({**cell.line(), **bench.measure_on_ranks(cell, 200.0)})
    assert [line.get("error") for line in lines] == [None, None]
    (compared,) = bench.compare(lines, torch.float32)
    assert compared["equal"], compared
    assert lines[0]["tokens"] == 2 * 2 * 16


@pytest.mark.slow
def test_no_import_touches_a_gpu() -> None:
    """Each side is forked from a process with these imports, after which CUDA must still work."""
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


def test_lora_without_peft_ends_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, building a model with 48 layers takes a third of the job's time."""
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.parse(["--mode", "lora"])
    assert "--mode lora needs PEFT" in capsys.readouterr().err
    bench.parse([])
