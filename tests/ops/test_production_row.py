"""Kernels with the block sizes of real models have full blocks of 128 rows and unmasked loops.

The sizes of all other tests are so small that tiles are not full and loops need masks.
"""

import math
import subprocess
import sys

import pytest
import torch
from launches import Launches
from support.close import max_error
from support.scripts import ROOT
from torch import Tensor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import blocks
from hf_moe_ep.ops.kernels.blocks import FEW_ROWS, MANY_ROWS, TABLE

ROW = ("sm_90", 2, "many")
NAMES = ("rows", "weights", "up", "down")


def _draw(tokens: int, top_k: int, experts: int, hidden: int, ffn: int, device: str):  # type: ignore[no-untyped-def]
    generator = torch.Generator(device).manual_seed(0)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tensors = [
        draw_normal(tokens, hidden),
        draw_normal(tokens, top_k).abs(),
        draw_normal(experts, 2 * ffn, hidden) / hidden**0.5,
        draw_normal(experts, hidden, ffn) / ffn**0.5,
    ]
    ids_RK = draw_normal(tokens, experts).argsort(1)[:, :top_k]
    return tensors, ids_RK, draw_normal(tokens, hidden)


def _run(tensors: list[Tensor], ids_RK: Tensor, grad_RH: Tensor, backend: str) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    rows_RH, weights_RK, up, down = leaves
    experts = ExpertWeights(up, None, down, None)
    out_RH = expert_mlp(rows_RH, ids_RK, weights_RK, experts, ExpertFormula(), backend=backend)
    return [out_RH.detach(), *torch.autograd.grad(out_RH, leaves, grad_RH)]


def _check_errors(
    tensors: list[Tensor], ids_RK: Tensor, grad_RH: Tensor, dtype: torch.dtype
) -> None:
    """Check that errors against fp64 are at most twice the errors of torch in the same dtype."""
    low = [x if index == 1 else x.to(dtype) for index, x in enumerate(tensors)]
    grad_RH = grad_RH.to(dtype)
    truth = _run([x.double() for x in low], ids_RK, grad_RH.double(), "torch")
    plain, ours = (_run(low, ids_RK, grad_RH, backend) for backend in ("torch", "triton"))
    for name, got, other, true in zip(("out", *NAMES), ours, plain, truth, strict=True):
        error, budget = max_error(got, true), 2 * max_error(other, true)
        assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2048, 256, 64])
def test_sixteen_experts_of_qwen3_30b_are_no_worse_than_torch(rows: int) -> None:
    """2048, 256 and 64 rows per expert use the table's rows "many", "some" and "few".

    Each row of the table is a test of its own, so a run that is stopped knows which have passed.
    """
    top_k, experts = 8, 16
    assert 64 < FEW_ROWS <= 256 < MANY_ROWS <= 2048
    tensors = _draw(rows * experts // top_k, top_k, experts, 2048, 768, "cuda")
    _check_errors(*tensors, torch.bfloat16)


BACKWARD_FIRST = """
import torch
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
def draw(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
rows, up, down = draw(2048, 2048), draw(16, 1536, 2048), draw(16, 2048, 768)
ids = torch.rand(2048, 16, device="cuda").topk(8).indices
experts = ExpertWeights(up, None, down, None)
out = expert_mlp(rows, ids, torch.rand(2048, 8, device="cuda"), experts, ExpertFormula(),
                 backend="triton")
torch.autograd.grad(out, [rows, up, down], torch.ones_like(out))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_backward_may_be_the_first_work_of_autograds_thread() -> None:
    """No CUDA context is current in this thread of a new process, and TMA needs one."""
    result = subprocess.run(
        [sys.executable, "-c", BACKWARD_FIRST],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
def test_the_smallest_sizes_with_full_blocks_are_no_worse_than_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter runs the kernels in fp16. Only the last tile of each expert is not full."""
    monkeypatch.setattr(blocks, "generation", lambda device: ROW[0])
    row = TABLE[ROW]
    products = (row.up, row.down, row.rows, row.dgated, row.outer)
    size = math.lcm(row.outer.m, *(n for block in products for n in (block.n, block.k)))
    experts, top_k = 2, 1
    tokens = MANY_ROWS * experts + 5
    tensors, ids_RK, grad_RH = _draw(tokens, top_k, experts, size, size, "cpu")
    with Launches() as launches:
        _launch(size, tokens, experts)
    loops = {name: launches.variants[name] for name in ("up_kernel", "dgated_kernel")}
    loops |= {name: launches.variants[name] for name in ("grouped_mm_kernel", "outer_kernel")}
    for name, variants in loops.items():
        assert variants and all("'EVEN_N': ('constexpr', True)" in x for x in variants), name
    _check_errors(tensors, ids_RK, grad_RH, torch.float16)


def _launch(size: int, tokens: int, experts: int) -> None:
    """Launch the kernels of forward and backward on meta tensors."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float16, device="meta")

    weights = ExpertWeights(empty(experts, 2 * size, size), None, empty(experts, size, size), None)
    rows_RH, weights_RK = empty(tokens, size), empty(tokens, 1)
    routing = triton_mlp.route(weights_RK.long(), None, weights, rows_RH)
    call = (rows_RH, weights_RK, weights, routing)
    out_RH, pre_AG = triton_mlp.forward(*call, ExpertFormula(), True)
    triton_mlp.backward(
        out_RH, *call, pre_AG, ExpertFormula(), grad_scale=1.0, need={"rows", "up", "down"}
    )
