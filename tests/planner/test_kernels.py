"""Planned kernels of experts have the FLOPs, bytes, dtypes and launches of a count by hand."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny

from hf_moe_ep import ParallelConfig
from hf_moe_ep.moe.dispatch import all_to_all
from hf_moe_ep.planner.counted import TRANSIENT
from hf_moe_ep.planner.kernels import ExpertCall, count_kernels
from hf_moe_ep.planner.step import Batch, plan_step
from hf_moe_ep.planner.work import Operator, StepWork, WorkCounter

# 3 tokens choose 2 of 2 experts: 6 pairs. The up product has 2 * 4 columns (gate and up).
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


def test_launches_of_a_small_expert_mlp_equal_a_count_by_hand() -> None:
    up = _grouped(2 * 6 * 10 * 8, 6 * 10 + 2 * 8 * 10 + 6 * 4 + 6 * 8)
    down = _grouped(2 * 6 * 4 * 10, 6 * 4 + 2 * 10 * 4 + 6 * 10)
    # combine reads 6 rows, int32 positions and fp32 weights of 6 pairs, and writes 3 sums.
    combine = Operator("memory", "bfloat16", 0, 2 * (6 + 3) * 10 + 6 * (4 + 4))
    assert CALL.list_forward_launches(keep_pre=True) == [up, down, combine]
    # route reads expert ids of 8 bytes twice, and writes three lists of 4 bytes per pair.
    assert CALL.list_route_launches() == [
        Operator("memory", "", 0, 2 * 6 * 8 + 3 * 6 * 4, launches=4)
    ]
    # dgated reads gradients of outputs and pre-activations, and writes gradients of pre-activations
    # and activations.
    dgated = _grouped(2 * 6 * 10 * 4, 6 * 10 + 2 * 10 * 4 + 6 * 8 + 6 * 8 + 6 * 4)
    weights = Operator("memory", "float32", 0, 4 * (6 + 6 + 6))
    rows = _grouped(2 * 6 * 8 * 10, 6 * 8 + 2 * 8 * 10 + 6 * 10)
    unweighted = Operator("memory", "bfloat16", 0, 2 * (6 + 3) * 10 + 6 * 4)
    backward = [dgated, weights, rows, unweighted]
    assert CALL.list_row_launches(ALL, recompute=False) == backward
    assert CALL.list_row_launches(ALL, recompute=True) == [up, *backward]
    of_down = _grouped(2 * 6 * 10 * 4, 6 * (10 + 4) + 2 * 10 * 4)
    of_up = _grouped(2 * 6 * 8 * 10, 6 * (8 + 10) + 2 * 8 * 10)
    assert CALL.list_grad_launches(ALL) == [of_down, of_up]


def _plan_work(like_gpu: bool = True, **parallel: Any) -> StepWork:
    config = tiny(num_hidden_layers=2).config
    options: dict[str, Any] = {"world_size": 2, "batch": Batch(24, 2), "like_gpu": like_gpu}
    return plan_step(config, ParallelConfig(**parallel), **options).work


def _count_products(work: StepWork) -> int:
    return sum(
        number * phase.times
        for phase in work.phases.values()
        for operator, number in phase.operators
        if operator.kind == "grouped"
    )


@pytest.mark.parametrize(
    ("parallel", "products"),
    [
        pytest.param({}, 6, marks=pytest.mark.slow),
        pytest.param({"recompute_activations": True}, 7, marks=pytest.mark.slow),
        pytest.param({"ep_size": 2}, 6, marks=pytest.mark.slow),
        ({"ep_size": 2, "dispatch_chunks": 2}, 12),
    ],
)
def test_a_gpu_step_is_planned_with_fused_kernels(parallel: dict[str, Any], products: int) -> None:
    """A layer runs 6 grouped products per chunk: up, down, dgated, rows, two weight gradients."""
    on_gpu, on_cpu = _plan_work(**parallel), _plan_work(like_gpu=False, **parallel)
    assert _count_products(on_gpu) == 2 * products
    assert on_gpu.flops("grouped") == on_cpu.flops("grouped") > 0
    assert on_gpu.launches() < on_cpu.launches() and on_gpu.nbytes() < on_cpu.nbytes()


def test_the_sums_of_copied_rows_are_planned_as_one_launch() -> None:
    work = WorkCounter()
    work.begin("step")
    rows_NH = torch.zeros(5, 10, dtype=torch.bfloat16)
    row_TJ = torch.zeros(3, 2, dtype=torch.int32)
    with count_kernels(work):
        out_TH = all_to_all.add_rows(rows_NH, row_TJ.flatten(), row_TJ, torch.float32)
    assert out_TH.shape == (3, 10) and out_TH.dtype == torch.float32
    # The kernel reads 5 bf16 rows and 6 int32 numbers, and writes 3 fp32 rows.
    launch = Operator("memory", "bfloat16", 0, 2 * 5 * 10 + 4 * 6 + 4 * 3 * 10)
    assert work.counted().phases["step"].operators == ((launch, 1),)


def test_a_call_without_output_ends_after_the_first_product() -> None:
    first, *_ = CALL.list_forward_launches(keep_pre=True)
    assert CALL.list_forward_launches(keep_pre=True, skip_output=True) == [first]
    assert CALL.list_forward_launches(keep_pre=False, skip_output=True) == []


def test_the_torch_backend_is_planned_if_it_is_requested() -> None:
    """Each of 8 experts runs 6 products in each of 2 layers."""
    assert _count_products(_plan_work(experts_backend="torch")) == 2 * 6 * 8


def test_experts_are_planned_with_the_memory_of_their_kernels() -> None:
    """With 32 more columns, the forward of each of 1024 pairs holds 32 more activations and 64 more
    pre-activations, in bf16.
    """
    held = {}
    for ffn in (32, 64):
        config = tiny(num_hidden_layers=1, hidden_size=64, moe_intermediate_size=ffn).config
        options: dict[str, Any] = {"world_size": 1, "batch": Batch(512), "optimizer": "none"}
        plan = plan_step(config, **options, all_layers=True)
        held[ffn] = plan.made_of["forward, layer 0"][TRANSIENT]
    assert held[64] - held[32] == 2 * 512 * config.num_experts_per_tok * (32 + 64)
