"""In an ep group of one rank every step of dispatch runs, but no row is sent.

With NCCL this test needs only one GPU. It covers transfers of size 0, the header in pinned memory
and the kernel that adds rows.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.close import assert_close
from support.ranks import run_ranks

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.ops import reference
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.sharding.options import choose_default_device

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 50, 32, 16, 6, 3
HEADER = Header(1, 0, True, True, False, False, TOP_K, 4)


def _compare_with_reference(rank: int, world: int, folder: str, device: str) -> None:
    if device == "cuda":
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(store=store, rank=0, world_size=1)
    assert choose_default_device().type == device
    assert dist.group.WORLD is not None
    ids_TK = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K].to(device)
    shapes = {"x": (TOKENS, HIDDEN), "w": (TOKENS, TOP_K)}
    shapes |= {"up": (EXPERTS, 2 * FFN, HIDDEN), "down": (EXPERTS, HIDDEN, FFN)}
    truth = {name: torch.randn(shape).to(device).double() for name, shape in shapes.items()}
    inputs = {name: tensor.float().requires_grad_() for name, tensor in truth.items()}
    formula = ExpertFormula()
    # A user may have set a default device. On "meta", a tensor without its own device fails.
    with torch.device("cuda" if device == "cuda" else "meta"):
        (exchange,) = AllToAll(dist.group.WORLD, EXPERTS).start_plan(ids_TK, HEADER).finish()
    arriving = exchange.start(Tokens(inputs["x"], inputs["w"], ids_TK))
    rows_RH, w_RK, ids_RK = arriving.finish()
    experts = ExpertWeights(inputs["up"], None, inputs["down"], None)
    backend = "triton" if device == "cuda" else "torch"
    y_RH = expert_mlp(
        rows_RH, ids_RK, w_RK, experts, formula, counts_L=arriving.counts_L, backend=backend
    )
    out_TH = arriving.start_combine(y_RH).finish()
    out_TH.square().sum().backward()
    for tensor in truth.values():
        tensor.requires_grad_()
    experts = ExpertWeights(truth["up"], None, truth["down"], None)
    want_TH = reference.expert_mlp(truth["x"], ids_TK, truth["w"], experts, formula)
    want_TH.square().sum().backward()
    budget = 1e-5  # fp32 against fp64, sums of at most 64 terms
    assert_close("out", out_TH, want_TH, budget)
    for name, tensor in inputs.items():
        assert_close(f"grad of {name}", tensor.grad, truth[name].grad, budget)
    assert exchange.num_sent == exchange.num_received == 0 and exchange.num_own == TOKENS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dispatch_on_one_rank_equals_the_reference(tmp_path: Path, device: str) -> None:
    run_ranks(_compare_with_reference, 1, str(tmp_path), device)
