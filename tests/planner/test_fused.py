"""`Fusion` counts the same kernels of compiled code as a count by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import tiny
from torch import Tensor

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.fused import Fusion, Kernel, mark_compiled_regions
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.planner.work import WorkCounter

ROWS, WIDTH = 64, 32
BF16 = 2 * ROWS * WIDTH  # bytes of a bf16 tensor


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _count_kernels(function: Callable[..., Any], *args: Any) -> tuple[list[Kernel], int, int]:
    """Run a compiled function, multiply its result, and count kernels, bytes and launches."""
    fusion = Fusion()
    work = WorkCounter(fusion=fusion)
    with mark_compiled_regions(fusion):
        compiled = torch.compile(function)
        work.begin("step")
        with work:
            out = compiled(1.0 * args[0], *args[1:])  # backward reads the gradient of the input
            factor = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
            product = out @ factor
            if product.requires_grad:
                product.backward(torch.ones_like(product))
    return fusion.kernels(), work.counted().nbytes(), work.counted().launches()


def _make_inputs(*, grad: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=grad)
    return x, torch.ones(WIDTH, dtype=torch.bfloat16)


def test_a_norm_is_one_kernel() -> None:
    (kernel,), *_ = _count_kernels(_norm, *_make_inputs(grad=False))
    mean = 4 * ROWS  # written, because it is small
    assert kernel.nbytes == BF16 + 2 * WIDTH + mean + BF16
    assert kernel.launches == 1


def test_backward_reads_the_input_again_instead_of_saved_results() -> None:
    kernels, *_ = _count_kernels(_norm, *_make_inputs(grad=True))
    assert len(kernels) == 2
    # x, the mean, the weight and the gradient are read, and the gradient of x is written.
    sums = 4 * ROWS
    assert kernels[1].nbytes <= 3 * BF16 + 2 * WIDTH + 4 * sums
    assert kernels[1].nbytes >= 3 * BF16


def test_a_sum_over_rows_is_a_separate_kernel() -> None:
    def sums(x: Tensor, weight: Tensor) -> Tensor:
        return (x * 2).sum(0) * weight

    kernels, *_ = _count_kernels(lambda x, weight: sums(x, weight)[None], *_make_inputs(grad=False))
    # The rows are read for the sum. The product with the weight reads two rows and writes one.
    assert [kernel.nbytes for kernel in kernels] == [BF16 + 2 * WIDTH, 3 * 2 * WIDTH]


def test_a_product_ends_a_kernel() -> None:
    def two_kernels(x: Tensor, weight: Tensor) -> Tensor:
        return (x * 2 @ torch.eye(WIDTH, dtype=x.dtype)) * weight

    kernels, *_ = _count_kernels(two_kernels, *_make_inputs(grad=False))
    # The graph makes torch.eye: it is filled, and written to memory for the product.
    assert [kernel.nbytes - BF16 * 2 for kernel in kernels[-1:]] == [2 * WIDTH]
    assert len(kernels) == 2


def test_each_operator_of_untraced_code_is_counted() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2 * 3

    fusion = Fusion()
    work = WorkCounter(fusion=fusion)
    with mark_compiled_regions(fusion):
        opaque = torch.compiler.disable(twice)
        compiled = torch.compile(lambda x: opaque(x * 5 * 7) * 11 * 13)
        x = torch.ones(ROWS, WIDTH)
        work.begin("step")
        with work:
            out = compiled(x)
    kernels = fusion.kernels()
    fp32 = 2 * BF16
    assert [kernel.nbytes for kernel in kernels[:1]] == [2 * fp32]
    operators = dict(work.counted().phases["step"].operators)
    # Both products of the opaque function, and the kernel before this function.
    assert sum(n * o.nbytes for o, n in operators.items()) == (2 + 1) * 2 * fp32
    assert float(out[0, 0]) == 2 * 3 * 5 * 7 * 11 * 13


def test_a_tensor_that_another_graph_reads_is_written() -> None:
    fusion = Fusion()
    work = WorkCounter(fusion=fusion)
    x = torch.ones(ROWS, WIDTH)
    with mark_compiled_regions(fusion):
        first, second = torch.compile(lambda x: 2 * x), torch.compile(lambda x: 3 * x)
        work.begin("step")
        with work:
            (second(first(x)) @ torch.ones(WIDTH, 1)).sum()
    fp32 = 2 * BF16
    assert [kernel.nbytes for kernel in fusion.kernels()] == [2 * fp32, 2 * fp32]


def _plan(ep_size: int, *, checkpointing: bool = False, **config: Any) -> StepPlan:
    parallel = ParallelConfig(ep_size=ep_size, **config)
    batch = Batch(64, checkpointing=checkpointing)
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    model = tiny(num_hidden_layers=6, norm_topk_prob=False, **sizes)
    return plan_step(model.config, parallel, world_size=4, batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_plan_of_compiled_layers_moves_fewer_bytes(ep_size: int, checkpointing: bool) -> None:
    eager, compiled = (
        _plan(ep_size, checkpointing=checkpointing, compile_layers=compile_layers).work
        for compile_layers in (False, True)
    )
    assert compiled.nbytes() < eager.nbytes()
    assert compiled.launches() < 0.6 * eager.launches()
    # The same products and exchanges run.
    assert compiled.flops() == eager.flops()
    assert compiled.sent("rows", 8) == eager.sent("rows", 8)
    if ep_size == 1:
        return  # compiled layers contain their experts, so FSDP2 prefetches other units
    heads = [work.phases["backward, head"].operators for work in (eager, compiled)]
    assert heads[0] == heads[1]
