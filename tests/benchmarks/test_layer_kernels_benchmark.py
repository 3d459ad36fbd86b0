"""benchmarks/layer_kernels.py times the calls that a layer makes, and sums the times."""

import json
from dataclasses import replace
from typing import Any

import layer_kernels as bench
import pytest
import torch
from block_candidates import CANDIDATES, requiring_tma

from hf_moe_ep.ops.kernels.blocks import TABLE

SIZES = bench.Sizes(tokens=12, experts=3, top_k=2, hidden=32, ffn=16)


@pytest.fixture(scope="module")
def layer() -> bench.Layer:
    return bench.Layer(SIZES)


def test_calls_have_the_order_and_results_of_the_layer(layer: bench.Layer) -> None:
    """A kernel call that is repeated separately returns the same result as in the layer."""
    calls = layer.calls(layer.table_row())
    assert [call.label for call in calls] == list(bench.LABELS.values())
    assert [call.label for call in calls if not call.backward] == ["sort", "up", "down", "combine"]
    results = {call.label: call.result() for call in calls}
    grad_x, _, grad_up, grad_down = layer.both()
    assert torch.equal(results["combine"], layer.forward())
    assert torch.equal(results["combine dx"], grad_x)
    assert torch.equal(results["dW up"], grad_up) and torch.equal(results["dW down"], grad_down)


@pytest.mark.slow
def test_sums_are_over_all_kernels(layer: bench.Layer, capsys: pytest.CaptureFixture[str]) -> None:
    row = layer.table_row()
    assert bench.time_table(layer, row, 1) == 0
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    single = {line["kernel"]: line["ms"] for line in lines[:-2]}
    total, whole = lines[-2:]
    assert total["kernel"] == "sum" and total["both_ms"] == pytest.approx(sum(single.values()))
    flops = 2 * 12 * 2 * 32 * 16
    assert whole["both_tflops"] == pytest.approx(9 * flops / whole["both_ms"] / 1e9, rel=1e-4)


@pytest.mark.parametrize(
    ("bucket", "of_outer"), [("many", "many"), ("some", "few"), ("few", "few")]
)
def test_a_sweep_times_every_candidate_for_the_blocks_of_its_row(
    bucket: str, of_outer: str
) -> None:
    """The row for 4096 tokens ("some") has `outer` from "few", and other blocks from "many"."""
    row = TABLE["sm_90", 2, bucket]
    swept = {
        (field, getattr(blocks, field), blocks.m) for field, blocks in bench.list_candidates(row)
    }
    buckets = {"outer": of_outer} | dict.fromkeys(
        ("up", "down", "rows", "dgated"), "few" if bucket == "few" else "many"
    )
    wanted = {
        (field, candidate.block, row.m)
        for field, of_field in buckets.items()
        for candidate in CANDIDATES
        if (candidate.row, candidate.field) == (("sm_90", 2, of_field), field)
        and candidate.block != getattr(row, field)
    }
    assert len(wanted) > 10 and wanted <= swept
    assert all(
        getattr(blocks, field) != getattr(row, field) or blocks.m != row.m
        for field, blocks in bench.list_candidates(row)
    )


@pytest.mark.parametrize("m", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_a_sweep_times_the_blocks_of_the_table_first_and_last(
    m: int,
    layer: bench.Layer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A candidate that only won because clocks rose is not kept."""
    row = layer.table_row()
    candidates = [(field, replace(row, m=m, rank=8)) for field in ("up", "down")]
    # The times of the table's block at first, of the candidate, and of the table's block at last.
    times = {"up": [1.0, 0.9, 0.8], "down": [1.0, 0.9, 1.1]}

    def measure(call: bench.Call, *_: Any) -> list[float]:
        return [times.get(call.label, [1.0] * 3).pop(0)]

    monkeypatch.setattr(bench, "list_candidates", lambda row: candidates)
    monkeypatch.setattr(bench, "measure", measure)
    bench.sweep(layer, row, bench.parse(["--workers", "0"]), float("inf"))
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    best = {line["best"]: line for line in lines if "best" in line}
    assert not any(times.values())
    shown = {
        label: [line[key] for key in ("block", "ms", "table_first_ms", "table_last_ms", "table_ms")]
        for label, line in best.items()
    }
    assert shown["up"] == ["", 0.8, 1.0, 0.8, 0.8]
    assert shown["down"] == [bench.format_block(candidates[1][1], "down"), 0.9, 1.0, 1.1, 1.0]
    assert "keep" in best["up"] and "keep" not in best["down"]


@pytest.mark.parametrize("ffn", [16, 18])
def test_a_block_with_tma_that_loads_through_pointers_is_an_error(ffn: int) -> None:
    """Rows of 18 fp32 numbers do not begin at multiples of 16 bytes."""
    layer = bench.Layer(replace(SIZES, ffn=ffn))
    row = layer.table_row()
    with_tma = replace(row, down=replace(row.down, tma=True))
    (down,) = (call for call in layer.calls(row) if call.label == "down")
    outside = down.result(with_tma).clone()
    with requiring_tma():
        if ffn == 16:
            assert torch.equal(down.result(with_tma), outside)
        else:
            with pytest.raises(ValueError, match=r"TMA cannot load .*\(3, 18, 32\)"):
                down.run(with_tma)
