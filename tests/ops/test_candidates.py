"""Ways through the kernels that no row of the table takes yet: only a GPU can say if they pay."""

from dataclasses import replace

import pytest
import torch
from expert_cases import FORMULAS, NAMES, TRITON, Case
from torch import Tensor

from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import grouped_mm
from hf_moe_ep.ops.kernels.blocks import CANDIDATES, TABLE, Block, Blocks, generation


def _grads(case: Case, inputs: list[Tensor | None], device: str) -> list[Tensor]:
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    rows_RH, weights_RK, *experts = leaves
    args = (rows_RH, case.ids_RK(device), weights_RK, ExpertWeights(*experts), case.formula)
    expert_mlp(*args, counts_L=case.counts_L(), backend="triton").square().sum().backward()
    return [leaf.grad for leaf in leaves if leaf is not None]


def _change(monkeypatch: pytest.MonkeyPatch, device: str, **fields: Block) -> None:
    """Put blocks into every row of the table that a device uses for fp32."""
    for bucket in ("many", "few"):
        key = (generation(torch.device(device)), 4, bucket)
        monkeypatch.setitem(TABLE, key, replace(TABLE[key], **fields))


def _own(device: str) -> Blocks:
    return TABLE[(generation(torch.device(device)), 4, "many")]


@pytest.mark.parametrize(("backend", "device"), TRITON)
def test_rows_copied_by_blocks_give_the_same_gradient(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that end amid an expert read rows of the next one, and the last tile rows of none."""
    case = FORMULAS["silu"]
    inputs = case.inputs(torch.float32, device)
    want = _grads(case, inputs, device)
    made = []
    real = grouped_mm.TensorDescriptor
    describe = {"from_tensor": lambda *args: made.append(args) or real.from_tensor(*args)}
    monkeypatch.setattr(grouped_mm, "TensorDescriptor", type("Counted", (), describe))
    _change(monkeypatch, device, rows=replace(_own(device).rows, tma=True))
    got = _grads(case, inputs, device)
    assert len(made) == 2  # of the rows and of the matrix
    for name, mine, theirs in zip(NAMES, got, want, strict=False):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize("name", ["silu", "gpt-oss"])
def test_a_wide_block_of_dgated_goes_through_the_gate_by_quarters(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FORMULAS[name]
    inputs = case.inputs(torch.float32, device)
    want = _grads(case, inputs, device)
    _change(monkeypatch, device, dgated=replace(_own(device).dgated, n=256))
    got = _grads(case, inputs, device)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)  # fp32: sums of other lengths


def test_candidates_change_their_row_and_differ_from_it() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    for candidate in CANDIDATES:
        row = TABLE[candidate.row]
        assert getattr(row, candidate.field) != candidate.block
        assert getattr(candidate.blocks(), candidate.field) == candidate.block
        assert (
            replace(candidate.blocks(), **{candidate.field: getattr(row, candidate.field)}) == row
        )
