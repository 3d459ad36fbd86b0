"""benchmarks/layer_kernels.py times the calls that a layer makes, and sums the times."""

import json

import layer_kernels as bench
import pytest
import torch
from block_candidates import CANDIDATES

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
