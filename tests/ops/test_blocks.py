"""A GPU uses the right row of the table of block sizes, and fp32 products the right precision."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import FORMULAS, NAMES, TRITON, Case
from support.close import assert_close
from torch import Tensor
from transformers.utils.import_utils import enable_tf32

from hf_moe_ep.ops import reference
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels import blocks, product
from hf_moe_ep.ops.kernels.blocks import generation, get_dot_precision

# Compute capability: (shared memory per block from CUDA's programming guide, expected row).
KINDS = {
    (8, 0): (166_912, "sm_80"),
    (8, 6): (101_376, "sm_80"),
    (8, 9): (101_376, "sm_80"),
    (9, 0): (232_448, "sm_90"),
    (10, 0): (232_448, "sm_90"),
    (12, 0): (101_376, "sm_80"),
    (12, 1): (101_376, "sm_80"),
    (99, 0): (101_376, "sm_80"),  # does not exist
    (99, 1): (400_000, "sm_90"),
}


@pytest.mark.parametrize("capability", KINDS)
def test_a_gpu_gets_a_row_that_fits_into_its_shared_memory(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, row = KINDS[capability]
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], shared_memory_per_block_optin=shared
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(blocks, "_find_generation", blocks._find_generation.__wrapped__)
    assert generation(torch.device("cuda", 0)) == row


@pytest.mark.parametrize("num_pairs", [100, 10_000])
def test_quantised_matrices_do_not_change_the_rows_per_tile(
    num_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routing depends on this number, and is made without the matrices."""
    for row, dtype in itertools.product(("sm_80", "sm_90"), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(blocks, "generation", lambda device, row=row: row)
        rows = torch.empty(1, dtype=dtype)
        usual = blocks.choose_blocks(rows, 8, num_pairs)
        quantised = blocks.choose_blocks(rows, 8, num_pairs, "nf4")
        assert quantised.m == usual.m
        assert (quantised == usual) == (dtype != torch.float32)


def _compute_gradients(case: Case, inputs: list[Tensor | None], device: str) -> list[Tensor]:
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    rows_RH, weights_RK, *experts = leaves
    args = (rows_RH, case.ids_RK(device), weights_RK, ExpertWeights(*experts), case.formula)
    out_RH = expert_mlp(*args, counts_L=case.counts_L(), backend="triton")
    return list(torch.autograd.grad(out_RH.square().sum(), [x for x in leaves if x is not None]))


def _change_blocks(monkeypatch: pytest.MonkeyPatch, device: str, field: str, **to: Any) -> None:
    """Change a block in the rows of the table that the device uses for fp32."""
    for bucket in ("many", "some", "few"):
        key = (generation(torch.device(device)), 4, bucket)
        row = blocks.TABLE[key]
        changed: dict[str, Any] = {field: replace(getattr(row, field), **to)}
        monkeypatch.setitem(blocks.TABLE, key, replace(row, **changed))


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize("name", [pytest.param("silu", marks=pytest.mark.slow), "gpt-oss"])
def test_a_block_of_dgated_that_is_wider_than_128_gives_the_same_gradients(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel applies the gate's formula to quarters of such a block."""
    case = FORMULAS[name]
    inputs = case.draw_inputs(torch.float32, device)
    want = _compute_gradients(case, inputs, device)
    _change_blocks(monkeypatch, device, "dgated", n=256)
    for got_grad, want_grad in zip(_compute_gradients(case, inputs, device), want, strict=True):
        torch.testing.assert_close(got_grad, want_grad)  # sums in fp32 of other lengths


# The number of TMA descriptors in the launches of each field. In up, dgated and outer one factor is
# gathered, and has no descriptor. There are two launches of outer.
DESCRIPTORS = {"up": 1, "down": 2, "rows": 2, "dgated": 1, "outer": 2}


@pytest.mark.parametrize(("backend", "device"), TRITON)
@pytest.mark.parametrize(
    "field",
    [
        "down",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("up", "rows", "dgated", "outer")),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["silu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("transposed", "gpt-oss"))],
)
def test_blocks_that_tma_loads_give_the_same_gradients(
    name: str, field: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile that is not full also reads rows of the next expert, or, at the end, past all rows."""
    case = replace(FORMULAS[name], hidden=64, ffn=96)
    inputs = case.draw_inputs(torch.float32, device)
    want = _compute_gradients(case, inputs, device)
    descriptors = []

    class Counted(product.CheckedDescriptor):
        def __post_init__(self) -> None:
            product.TensorDescriptor.__post_init__(self)  # Triton's checks
            descriptors.append(self)

    monkeypatch.setattr(product, "CheckedDescriptor", Counted)
    _change_blocks(monkeypatch, device, field, tma=True)
    got = _compute_gradients(case, inputs, device)
    # No descriptor covers the same columns of two halves, if columns are contiguous in memory.
    by_pointers = field == "up" and name == "transposed"
    assert len(descriptors) == (0 if by_pointers else DESCRIPTORS[field])
    # NumPy computes interpreted products, and its rounding depends on a tile's place in memory.
    for got_grad, want_grad in zip(got, want, strict=True):
        torch.testing.assert_close(got_grad, want_grad)


@pytest.mark.parametrize("moved", ["start", "stride"])
def test_tensors_that_tma_cannot_address_are_loaded_through_pointers(
    moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses and strides must be multiples of 16 bytes."""
    block = replace(blocks.TABLE["interpreter", 4, "many"].down, tma=True)
    zeros = torch.zeros(3, 65, 68)
    part = zeros[:, :64, :64] if moved == "stride" else zeros.flatten()[1:12289].view(3, 64, 64)
    assert product.describe_matrix_blocks(part, block, block.n) == (None, "")
    rows = zeros[0, :, 1:65]
    assert product.describe_row_blocks(rows, block, 16, block.k) is None
    assert product.describe_row_blocks(zeros[0, :, 4:], block, 16, block.k) is not None
    assert product.describe_matrix_blocks(zeros[:, :64].contiguous(), block, block.n)[1] == "kn"
    assert product.describe_matrix_blocks(zeros[:, :63].contiguous(), block, block.n) == (None, "")


def test_tma_is_refused_where_no_kernel_uses_it() -> None:
    row = blocks.TABLE["sm_90", 2, "many"]
    with pytest.raises(ValueError, match="thin products do not support tma=True"):
        replace(row, thin=replace(row.thin, tma=True))


def test_a_cpu_gets_the_rows_of_the_interpreter() -> None:
    assert generation(torch.device("cpu")) == "interpreter"


@pytest.fixture
def fresh_switches() -> Iterator[None]:
    """Give the switches for fp32 products, which other tests set, their values in a new process."""
    enable_tf32.cache_clear()  # a second call with the same argument does nothing
    switches = (torch.backends, torch.backends.cuda.matmul)
    values = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "none"
    yield
    enable_tf32.cache_clear()
    for switch, value in zip(switches, values, strict=True):
        switch.fp32_precision = value


def test_fp32_experts_run_where_transformers_has_switched_tf32_on(fresh_switches: None) -> None:
    """TrainingArguments(tf32=True) and torch_compile=True do so. Then torch's old getter raises."""
    case = FORMULAS["silu, bias"]
    inputs = dict(zip(NAMES, case.draw_inputs(torch.float32), strict=True))
    rows_RH, weights_RK = inputs.pop("rows"), inputs.pop("weights")
    experts = ExpertWeights(**inputs)
    args = (rows_RH, case.ids_RK(), weights_RK, experts, case.formula)
    enable_tf32(True)
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    out_RH = expert_mlp(*args, counts_L=case.counts_L(), backend="triton")
    # The interpreter always computes exact products.
    assert_close("out", out_RH, reference.expert_mlp(*args), 2e-6)


def test_products_follow_each_switch_for_fp32_precision(fresh_switches: None) -> None:
    rows = torch.empty(1)
    assert get_dot_precision(rows) == "ieee"  # no switch is set
    enable_tf32(True)
    assert get_dot_precision(rows) == "tf32"
    enable_tf32(False)
    assert get_dot_precision(rows) == "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert get_dot_precision(rows) == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"
    for word, want in (("high", "tf32"), ("highest", "ieee"), ("medium", "tf32")):
        torch.set_float32_matmul_precision(word)
        assert get_dot_precision(rows) == want, word
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = True
    assert get_dot_precision(rows) == "tf32"


def test_sixteen_bit_products_read_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", None)
    rows: Tensor = torch.empty(1, dtype=torch.bfloat16)
    assert get_dot_precision(rows) == "tf32"
