"""Compare the counters of benchmarks/around_experts.py with counts by hand; run it on two ranks."""

import around_experts as bench
import pytest
import torch
from torch import nn


def test_work_counts_launches_and_bytes_of_large_tensors() -> None:
    """Copying 8 fp32 numbers reads 32 bytes and writes 32 bytes; a view launches no kernel."""
    large, small = torch.ones(8), torch.ones(4)
    with bench.Work(large=8) as work:
        large.view(2, 4).clone()
        small.clone()
    assert (work.launches, work.copied, work.sent) == (2, 64, 0)


def test_only_in_counts_operators_inside_the_module() -> None:
    module, x = nn.ReLU(), torch.ones(4)
    with bench.Work(large=1) as work, bench.only_in([module], work):
        x.clone()
        module(x)
    assert work.launches == 1 and work.is_counting


def test_loss_errors_are_measured_against_fp64() -> None:
    figures = bench.measure_loss_errors(tokens=64, hidden=16, vocab=300)
    stock = figures["error of the weight, bf16, stock"]
    chunks = figures["error of the weight, bf16, in chunks of 16 tokens"]
    assert 1e-3 < stock < 1e-2 and chunks < 2 * stock
    assert figures["error of the loss, bf16, in chunks of 16 tokens"] < 1e-3


def test_a_fused_loss_keeps_no_logits_of_the_whole_batch() -> None:
    """Stock has the logits, their gradient and a third tensor of this size at its peak."""
    figures = bench.measure_memory_of_loss(rows=2, length=512)
    whole, fused = figures.values()
    logits = 2 * 512 * 74 * 64 * 4 / 2**20
    assert whole > 3 * logits and fused < 1.5 * logits


def test_a_table_has_both_columns() -> None:
    table = bench.report({"a": 5.0, "b": 0.25}, {"a": 7.0})
    assert table.splitlines()[2:] == ["| a | 7 | 5 |", "| b | - | 0.25 |"]


@pytest.mark.slow
def test_figures_of_a_step_and_the_optimizer() -> None:
    """A layer has five collectives. With 40 % padding, about 40 % fewer rows are sent."""
    (figures, _) = bench.spawn(bench.measure_on_two_ranks, 2, timeout=200.0)
    assert figures["collectives of the ep group per layer, bf16"] == 5
    everything = figures["bytes sent per token and layer, autocast"]
    padded = figures["bytes sent per token and layer, autocast, 40 % padding"]
    assert 0.5 < padded / everything < 0.7
    assert figures["bytes copied per expert weight and micro-batch"] == 18
    calls = bench.count_optimizer_calls()
    fused = [value for name, value in calls.items() if "fused=True" in name]
    clip = [value for name, value in calls.items() if "clip_grad_norm_" in name]
    assert len(fused) == len(clip) == 2 and max(fused) <= 4 and max(clip) <= 30
    by_tensor = calls["operators of torch's clipping by tensor, full, 223 parameters"]
    assert by_tensor > 2 * 223  # a norm and a product per tensor
    assert len(bench.time_host_work(rounds=2)) == 3
