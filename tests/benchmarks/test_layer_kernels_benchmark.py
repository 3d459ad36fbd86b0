"""benchmarks/layer_kernels.py times the calls that the layer makes, and no wrong candidate."""

import json
from dataclasses import replace

import layer_kernels as bench
import pytest
import torch

SIZES = bench.Sizes(tokens=12, experts=3, top_k=2, hidden=32, ffn=16)


@pytest.fixture(scope="module")
def layer() -> bench.Layer:
    return bench.Layer(SIZES)


def test_calls_are_the_layers_own_in_their_order(layer: bench.Layer) -> None:
    """Made again alone each gives what it gave there, whatever ran since."""
    calls = layer.calls(layer.table_row())
    assert [call.label for call in calls] == list(bench.LABELS.values())
    assert [call.label for call in calls if not call.backward] == ["sort", "up", "down", "combine"]
    again = {call.label: call.result() for call in calls}
    grad_x, _, grad_up, grad_down = layer.both()
    assert torch.equal(again["combine"], layer.forward())
    assert torch.equal(again["combine dx"], grad_x)
    assert torch.equal(again["dW up"], grad_up) and torch.equal(again["dW down"], grad_down)


def test_with_adapters_no_product_has_the_name_of_another() -> None:
    """The base is frozen: what `outer` makes there are gradients of the adapters."""
    adapted = bench.Layer(replace(SIZES, adapter_rank=2))
    labels = [call.label for call in adapted.calls(adapted.table_row())]
    assert labels.count("up") == labels.count("down") == labels.count("dx") == 1
    assert [label for label in labels if label.startswith("outer")] == [
        f"outer {number}" for number in range(4)
    ]
    assert not any(label.startswith("dW") for label in labels)


@pytest.mark.slow
def test_a_call_runs_under_the_row_it_is_given(layer: bench.Layer) -> None:
    """A candidate's block reaches the kernel; one that cannot start is a line."""
    row = layer.table_row()
    calls = {call.label: call for call in layer.calls(row)}
    want = calls["up"].result()
    no_block = replace(row, up=None)
    with pytest.raises(AttributeError):
        calls["up"].run(no_block)
    line = bench.try_block(layer, calls["up"], no_block, want, 1)
    assert line["error"].startswith("AttributeError") and "ms" not in line
    other = replace(row, up=replace(row.up, k=16))
    assert bench.try_block(layer, calls["up"], other, want, 1)["ms"] > 0


def test_a_candidate_with_another_result_is_never_timed(layer: bench.Layer) -> None:
    row = layer.table_row()
    (up,) = [call for call in layer.calls(row) if call.label == "up"]
    line = bench.try_block(layer, up, row, 1.01 * up.result(), 1)
    assert "ms" not in line and line["error"] == "off by 9.9e-03 > 1e-05"
    for label in bench.FIELDS:
        field = bench.FIELDS.get(label, "")
        assert any(name == field and other != row for name, other in bench.candidates(row))


@pytest.mark.slow
def test_sums_are_of_all_kernels_and_name_one_that_did_not_run(
    layer: bench.Layer, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sum is published that leaves a kernel out."""
    row = layer.table_row()
    assert bench.time_table(layer, row, 1) == 0
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    single = {line["kernel"]: line["ms"] for line in lines[:-2]}
    total, whole = lines[-2:]
    assert total["kernel"] == "sum" and total["both_ms"] == pytest.approx(sum(single.values()))
    flops = 2 * 12 * 2 * 32 * 16
    assert whole["both_tflops"] == pytest.approx(9 * flops / whole["both_ms"] / 1e9, rel=1e-4)
    broken = layer.calls(row)
    broken[1].run = lambda blocks: 1 / 0
    layer.calls = lambda row: broken  # type: ignore[method-assign]
    try:
        assert bench.time_table(layer, row, 1) == 1
    finally:
        del layer.calls
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert lines[1]["error"].startswith("ZeroDivisionError")
    assert "both_ms" not in lines[-2] and lines[-2]["kernel"] == "sum"
