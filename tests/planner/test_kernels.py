"""The experts' kernels of a planned GPU step: FLOPs, bytes, dtypes and launches by hand."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.kernels import ExpertCall
from hf_moe_ep.planner.step import Batch, plan_step
from hf_moe_ep.planner.work import Operator, StepWork

# 3 tokens choose 2 of 2 experts: 6 pairs. Gated, so up makes 2 * 4 columns. Matrices in bf16.
CALL = ExpertCall(
    dtype=torch.bfloat16,
    pairs=6,
    rows=3,
    top_k=2,
    experts=2,
    hidden=10,
    pre=8,
    ffn=4,
    up_bytes=2 * 2 * 8 * 10,
    down_bytes=2 * 2 * 10 * 4,
)
ALL = {"rows", "weights", "up", "down"}


def _grouped(flops: int, numbers: int) -> Operator:
    return Operator("grouped", "bfloat16", flops, 2 * numbers)


def test_a_small_expert_mlp_by_hand() -> None:
    up = _grouped(2 * 6 * 10 * 8, 6 * 10 + 2 * 8 * 10 + 6 * 4 + 6 * 8)
    down = _grouped(2 * 6 * 4 * 10, 6 * 4 + 2 * 10 * 4 + 6 * 10)
    # Rows of 6 pairs, 3 sums; the positions of 6 pairs and their weights in fp32.
    combine = Operator("memory", "bfloat16", 0, 2 * (6 + 3) * 10 + 6 * (4 + 4))
    assert CALL.forward_launches(keep_pre=True) == [up, down, combine]
    # Ids of 8 bytes read twice; two lists of pairs and the positions of 4 bytes each.
    assert CALL.route_launches() == [Operator("memory", "", 0, 2 * 6 * 8 + 3 * 6 * 4, launches=4)]
    # Gradients and pre-activations in, gradients of those and activations out.
    dgated = _grouped(2 * 6 * 10 * 4, 6 * 10 + 2 * 10 * 4 + 6 * 8 + 6 * 8 + 6 * 4)
    weights = Operator("memory", "float32", 0, 4 * (6 + 6 + 6))
    rows = _grouped(2 * 6 * 8 * 10, 6 * 8 + 2 * 8 * 10 + 6 * 10)
    unweighted = Operator("memory", "bfloat16", 0, 2 * (6 + 3) * 10 + 6 * 4)
    back = [dgated, weights, rows, unweighted]
    assert CALL.row_launches(ALL, recompute=False) == back
    assert CALL.row_launches(ALL, recompute=True) == [up, *back]
    of_down = _grouped(2 * 6 * 10 * 4, 6 * (10 + 4) + 2 * 10 * 4)
    of_up = _grouped(2 * 6 * 8 * 10, 6 * (8 + 10) + 2 * 8 * 10)
    assert CALL.grad_launches(ALL) == [of_down, of_up]


def _work(like_gpu: bool = True, **parallel: Any) -> StepWork:
    config = tiny(num_hidden_layers=2).config
    given: dict[str, Any] = {"world_size": 2, "batch": Batch(24, 2), "like_gpu": like_gpu}
    return plan_step(config, ParallelConfig(**parallel), **given).work


def _products(work: StepWork) -> int:
    return sum(
        number * stretch.times
        for stretch in work.stretches.values()
        for one, number in stretch.operators
        if one.kind == "grouped"
    )


@pytest.mark.parametrize(
    ("parallel", "products"),
    [
        ({}, 6),
        ({"recompute_activations": True}, 7),
        ({"ep_size": 2}, 6),
        ({"ep_size": 2, "dispatch_chunks": 2}, 12),
    ],
)
def test_a_gpu_runs_kernels(parallel: dict[str, Any], products: int) -> None:
    """Up, down, dgated, rows and two outer, in each of 2 layers, once per chunk."""
    on_gpu, on_cpu = _work(**parallel), _work(like_gpu=False, **parallel)
    assert _products(on_gpu) == 2 * products
    assert on_gpu.flops("grouped") == on_cpu.flops("grouped") > 0
    assert on_gpu.launches() < on_cpu.launches() and on_gpu.nbytes() < on_cpu.nbytes()


def test_the_torch_path_is_planned_where_it_is_asked_for() -> None:
    """Each of 8 experts runs 6 products of its own in each of 2 layers."""
    assert _products(_work(experts_backend="torch")) == 2 * 6 * 8
