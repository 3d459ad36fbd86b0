"""The Triton kernels give equal results for quantised matrices and for dequantised matrices.

The kernels sum the same terms in both cases. The order of the additions depends on the processor
and on the layout of the operands, so results may differ by a few roundings. Only single tiles,
which are not summed, are equal to the bit. On a CPU the kernels run in Triton's interpreter, with
blocks so small that these sizes need several tiles, several steps of a sum and several blocks of
columns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from expert_cases import ADAPTERS, GPT_OSS, TRITON, Case, draw_ids, draw_with_adapters
from support.close import assert_close
from support.largest_tensor import LargestTensor
from test_quantised import FORMATS, quantise_matrices, round_matrices, run_call
from torch import Tensor

from hf_moe_ep.config import EXPERTS_DTYPES
from hf_moe_ep.ops import reference, triton_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.kernels.blocks import TABLE, generation
from hf_moe_ep.ops.kernels.dequantise import dequantise_tile, e4m3
from hf_moe_ep.ops.quantised import (
    NF4_CODES,
    Quantised,
    dequantise,
    dequantise_scales,
    quantise_stack,
)
from hf_moe_ep.ops.self_check import draw_quantised

# Experts 0 and 1 have two tiles, of which the second one has few rows. Expert 2 has no rows.
_IDS = [[0, 1], [1, 0]] * 8 + [[3, 1], [0, 3], [0, 1]]
# Sizes (hidden, ffn) for which a sum has one block of scales, and for which it has several.
SMALL = {"nf4": (64, 64), "nf4 nested": (64, 64), "fp8": (128, 128)}
LARGE = {"nf4": (192, 320), "nf4 nested": (192, 128), "fp8": (256, 384)}
FORMULAS = {
    "silu": {},
    "gpt-oss": {"formula": GPT_OSS, "bias": True},
    "no gate": {"formula": ExpertFormula(gated=False, activation="relu2")},
}
EDGES = {
    "empty experts": ([[3, 1], [1, 3], [3, 5]], 5),
    "all rows on one expert": ([[2, 4], [2, 4], [4, 2]] * 9, 4),
    "nothing here": ([[3, 3], [3, 3]], 3),
    "one pair": ([[1]], 2),
    "no rows": ([], 3),
}


def _make_case(
    name: str, sizes: dict[str, tuple[int, int]], ids: Any = _IDS, experts: int = 3
) -> Case:
    hidden, ffn = sizes[name]
    return Case(ids, experts, hidden, ffn)


def _compute_budget(dtype: torch.dtype) -> float:
    """Return the error that another order of additions can cause (see `self_check`).

    A byte that is read wrong causes an error of about one percent.
    """
    return (64 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps


def _check_values(case: Case, name: str, dtype: torch.dtype, rank: int = 5, **kw: Any) -> None:
    quantisation = FORMATS[name]
    named = draw_with_adapters(case, rank, dtype)
    if not rank:
        named |= dict.fromkeys(ADAPTERS)
    want = run_call(case, round_matrices(named, quantisation, dtype), "", backend="triton", **kw)
    as_bytes = quantise_matrices(named, quantisation, dtype)
    got = run_call(case, as_bytes, quantisation.kind, backend="triton", **kw)
    assert got.keys() == want.keys() and "rows" in got
    for tensor, value in want.items():
        assert_close(f"{name}, {kw}, {tensor}", got[tensor], value, _compute_budget(dtype))
    # Without this check, two results full of zeros would pass.
    if sum(case.counts_L()):
        assert all(value.any() for value in want.values())


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("nf4", "fp8")), "nf4 nested"]
)
def test_quantised_matrices_give_the_values_of_dequantised_matrices(name: str) -> None:
    """The test compares the output and the gradients of rows, routing weights and adapters."""
    _check_values(_make_case(name, SMALL), name, torch.float32)


_INTERPRETED = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real kernels run instead"),
]
ON_DEVICES = [
    pytest.param("cpu", torch.float32, marks=_INTERPRETED),
    *(
        pytest.param("cuda", dtype, marks=pytest.mark.gpu)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
]


@pytest.mark.parametrize(("device", "dtype"), ON_DEVICES)
@pytest.mark.parametrize("sizes", [(192, 320), (256, 384), (1024, 768)])
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("kind", EXPERTS_DTYPES)
def test_random_bytes_equal_their_values_on_each_device(
    kind: str, rank: int, sizes: tuple[int, int], device: str, dtype: torch.dtype
) -> None:
    """The bytes are random and `reference` dequantises them, so bitsandbytes is not needed."""
    if (device == "cpu" and sizes == (1024, 768)) or (kind == "fp8" and sizes == (192, 320)):
        pytest.skip("the sizes are too large for the interpreter, or not multiples of a block")
    rows = 21 if device == "cpu" else 700
    case = Case(draw_ids(rows, 2, 3, seed=5), 3, *sizes)
    named = draw_with_adapters(case, rank or 1, dtype, device)
    if not rank:
        named |= dict.fromkeys(ADAPTERS)
    generator = torch.Generator(device).manual_seed(0)
    as_bytes, values = dict(named), dict(named)
    for name in ("up", "down"):
        matrix = named[name]
        assert matrix is not None
        stack = draw_quantised(matrix, kind, generator)
        as_bytes |= stack.by_name(name)
        values[name] = reference.dequantise_matrices(stack, kind, dtype)
    want = run_call(case, values, "", backend="triton")
    got = run_call(case, as_bytes, kind, backend="triton")
    budget = _compute_budget(dtype)
    for tensor, value in want.items():
        assert_close(tensor, got[tensor], value, budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formula", "dtype"),
    [("silu", torch.float16), ("gpt-oss", torch.float32), ("no gate", torch.float32)],
)
@pytest.mark.parametrize("name", FORMATS)
def test_sums_over_several_blocks_of_scales_give_equal_values(
    name: str, formula: str, dtype: torch.dtype
) -> None:
    """The formulas cover all layouts of gate and up, with and without biases, without adapters."""
    case = replace(_make_case(name, LARGE), **FORMULAS[formula])
    _check_values(case, name, dtype, rank=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kw", [{"recompute": True}, {"postpone": True}, {"postpone": True, "chunks": 2}]
)
@pytest.mark.parametrize("name", FORMATS)
def test_options_of_backward_give_equal_values(name: str, kw: dict[str, Any]) -> None:
    """Pre-activations are recomputed, gradients of adapters postponed, or rows split in chunks."""
    _check_values(_make_case(name, SMALL), name, torch.float32, **kw)


@pytest.mark.slow
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_edges_give_equal_values(name: str, edge: str) -> None:
    _check_values(_make_case(name, SMALL, *EDGES[edge]), name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_blocks_with_several_scales_per_row_give_equal_values(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward, blocks are as wide as on a GPU. A row of a tile then has several scales.

    There is one scale per 64 or 128 columns. The last block of the 320 or 384 columns is not full.
    """
    for bucket, itemsize in itertools.product(("many", "some", "few"), (2, 4)):
        key = (generation(torch.device("cpu")), itemsize, bucket)
        row = TABLE[key]
        wide = {x: replace(getattr(row, x), n=width, k=64) for x in ("rows", "dgated", "down")}
        monkeypatch.setitem(TABLE, key, replace(row, **wide))
    case = _make_case(name, {"nf4": (320, 192), "fp8": (384, 128)}, [[0, 1], [1, 2]], 3)
    _check_values(case, name, torch.float32, rank=0)


@triton.jit
def _tile_kernel(
    values, scale, out, expert, first_o, first_i, num_o, num_i,
    KIND: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    o_o = first_o + tl.arange(0, ROWS)
    tile = dequantise_tile(
        values, scale, expert, o_o, first_i, num_o, num_i, KIND, NATIVE, TILE, False,
        out.dtype.element_ty,
    )  # fmt: skip
    tl.store(out + tl.arange(0, ROWS)[:, None] * TILE + tl.arange(0, TILE)[None, :], tile)


def _run_tile_kernel(
    stack: Quantised, kind: str, start: tuple[int, int, int], shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Dequantise a tile of shape (rows, columns) that starts at (expert, row, column)."""
    _, num_o, in_bytes = stack.values.shape
    out = torch.empty(shape, dtype=dtype, device=stack.values.device)
    num_i = in_bytes * (2 if kind == "nf4" else 1)
    args = (stack.values, dequantise_scales(stack), out, *start, num_o, num_i)
    _tile_kernel[(1,)](*args, KIND=kind, NATIVE=False, ROWS=shape[0], TILE=shape[1])
    return out


@pytest.mark.parametrize(("backend", "device"), TRITON)
def test_a_tile_of_nf4_equals_values_by_hand(backend: str, device: str) -> None:
    """Two experts have 2 x 128 values, with all codes. The first code of a byte is its upper half,
    and there is one scale per 64 columns.
    """
    values = torch.zeros(2, 2, 64, dtype=torch.uint8, device=device)
    # The first 16 columns of the second expert's second row are the codes 0 .. 15.
    values[1, 1, :8] = torch.tensor([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF])
    scale = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], device=device)
    stack = Quantised(values, scale)
    got = _run_tile_kernel(stack, "nf4", (1, 0, 0), (2, 128))
    want = torch.tensor([[-5.0] * 64 + [-6.0] * 64, [-7.0] * 64 + [-8.0] * 64])
    want[1, :16] = 7 * torch.tensor(NF4_CODES)
    assert torch.equal(got.cpu(), want)
    # The first tile is inside a block of scales, and the second tile exceeds the matrix.
    assert torch.equal(_run_tile_kernel(stack, "nf4", (1, 0, 96), (2, 16)).cpu(), want[:, 96:112])
    over = _run_tile_kernel(stack, "nf4", (1, 1, 64), (2, 128)).cpu()
    assert (over[0, :64] == -8).all() and not over[0, 64:].any() and not over[1].any()


@pytest.mark.parametrize(("backend", "device"), TRITON)
def test_a_tile_of_fp8_equals_values_by_hand(backend: str, device: str) -> None:
    """There is one scale per 128 x 128 values. Columns after the end of a row are 0, and not values
    of the next row.
    """
    values = torch.full((2, 256, 256), 0x7F, dtype=torch.uint8, device=device)  # NaN
    values[1, 130] = 0x38  # 1
    scale = torch.tensor([[[2.0, 3.0], [4.0, 5.0]], [[6.0, 7.0], [8.0, 9.0]]], device=device)
    stack = Quantised(values, scale)
    got = _run_tile_kernel(stack, "fp8", (1, 130, 0), (1, 256)).cpu()
    assert torch.equal(got, torch.tensor([[8.0] * 128 + [9.0] * 128]))
    over = _run_tile_kernel(stack, "fp8", (1, 130, 128), (1, 256)).cpu()
    assert torch.equal(over, torch.tensor([[9.0] * 128 + [0.0] * 128]))


@pytest.mark.parametrize(("backend", "device"), TRITON)
def test_every_byte_of_fp8_is_converted_as_by_torch(backend: str, device: str) -> None:
    """The bytes include subnormal values, both zeros and NaN.

    A kernel converts by arithmetic on bits or by an instruction, if the GPU has it. The interpreter
    emulates the instruction, but without NaN.
    """
    kinds = [False, True] if device == "cpu" or generation(torch.device(device)) == "sm_90" else [0]
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    want = byte.view(torch.float8_e4m3fn).float()
    for native in kinds:
        got = torch.empty(256, device=device)
        _convert_kernel[(1,)](byte, got, NATIVE=bool(native))
        if device == "cuda" or not native:
            assert torch.equal(got.isnan(), want.isnan()) and got.isnan().sum() == 2
        # The bits are compared, because -0 equals 0.
        real = ~want.isnan()
        assert torch.equal(got[real].view(torch.int32), want[real].view(torch.int32)), native


@triton.jit
def _convert_kernel(byte, out, NATIVE: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(out + o, e4m3(tl.load(byte + o), NATIVE))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_values_need_no_bitsandbytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested scales and `reference.dequantise_matrices` equal bitsandbytes to the bit."""
    quantisation = FORMATS[name]
    torch.manual_seed(0)
    # The 320 scales of an expert are a full block of 256 scales and a part of a second block.
    shape = (3, 128, 256) if quantisation.kind == "fp8" else (3, 80, 256)
    stack = quantise_stack(torch.randn(shape) * 3, quantisation)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    want = {
        dtype: torch.stack(
            [dequantise(stack.matrix_of(e), quantisation.kind, dtype) for e in range(3)]
        )
        for dtype in dtypes
    }
    monkeypatch.setattr("hf_moe_ep.ops.quantised._import_bitsandbytes", None)
    for dtype in dtypes:
        assert torch.equal(
            reference.dequantise_matrices(stack, quantisation.kind, dtype), want[dtype]
        )
        columns = shape[2]
        # The interpreter truncates to bf16 instead of rounding.
        tiles = () if dtype == torch.bfloat16 else ((0, 0), (2, 64))
        for expert, row in tiles:
            got = _run_tile_kernel(stack, quantisation.kind, (expert, row, 0), (64, columns), dtype)
            num_rows = min(64, shape[1] - row)
            assert torch.equal(got[:num_rows], want[dtype][expert, row : row + num_rows]), dtype


def _make_experts(name: str, case: Case) -> tuple[dict[str, Tensor | None], ExpertWeights]:
    quantisation = FORMATS[name]
    named = quantise_matrices(
        draw_with_adapters(case, 2, torch.float32), quantisation, torch.float32
    )
    weights = {key: x for key, x in named.items() if key not in ("rows", "weights")}
    return named, ExpertWeights(**weights, quantised=quantisation.kind)


@pytest.mark.parametrize("name", ["nf4 nested", pytest.param("fp8", marks=pytest.mark.slow)])
def test_no_tensor_is_as_large_as_a_dequantised_matrix(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward make no such tensor. The test notices a launcher that makes one."""
    case = _make_case(name, SMALL, [[0, 1]], 8)
    # The size is in bytes, because the interpreter handles the arguments of a launch as bytes.
    matrix_size = 4 * case.hidden * case.ffn
    named, experts = _make_experts(name, case)
    rows, weights = named["rows"], named["weights"]
    assert rows is not None and weights is not None

    def measure_largest() -> int:
        watch = LargestTensor(x for x in named.values() if x is not None)
        # `watch` does not see the interpreter's computations in NumPy, but it sees the arguments of
        # launches.
        with watch:
            routing = triton_mlp.route(case.ids_RK(), case.counts_L(), experts, rows)
            call = (rows, weights, experts, routing)
            _, pre = triton_mlp.forward(*call, case.formula, True)
            need = {"rows", "weights", *ADAPTERS}
            kw = {"grad_scale": 1.0, "need": need}
            triton_mlp.backward(rows, *call, pre, case.formula, **kw)
        return watch.elements

    assert 0 < measure_largest() < matrix_size

    def dequantise_all(experts: ExpertWeights, name: str) -> Tensor:
        return reference.dequantise_matrices(experts.stack(name), experts.quantised, torch.float32)

    monkeypatch.setattr(triton_mlp, "_select_matrices", dequantise_all)
    assert measure_largest() >= 8 * matrix_size


@pytest.mark.slow
def test_bytes_may_have_any_strides() -> None:
    """The output of an all-gather need not be contiguous."""
    case = _make_case("nf4", SMALL)
    named, experts = _make_experts("nf4", case)
    rows, weights = named["rows"], named["weights"]
    args = (rows, case.ids_RK(), weights)
    want = expert_mlp(*args, experts, case.formula, backend="triton", counts_L=case.counts_L())
    transposed = {
        name: getattr(experts, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("up", "down", "up_block_scale", "down_block_scale")
    }
    assert not transposed["up"].is_contiguous()
    other = replace(experts, **transposed)
    got = expert_mlp(*args, other, case.formula, backend="triton", counts_L=case.counts_L())
    torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_the_kernels_are_no_worse_than_the_torch_path(name: str) -> None:
    """The error against fp64 is at most twice the error of torch in fp32."""
    quantisation = FORMATS[name]
    case = _make_case(name, SMALL, [[0, 1], [1, 2], [0, 2]], 3)
    named = draw_with_adapters(case, 5, torch.float32)
    as_bytes = quantise_matrices(named, quantisation, torch.float32)
    values = round_matrices(named, quantisation, torch.float32)
    truth = run_call(case, {n: None if x is None else x.double() for n, x in values.items()}, "")
    plain = run_call(case, as_bytes, quantisation.kind)
    got = run_call(case, as_bytes, quantisation.kind, backend="triton")
    for tensor, want in truth.items():
        # The error of torch can be zero by luck, because sums have only 64 to 256 products.
        budget = 2 * float((plain[tensor] - want).abs().max() / want.abs().max()) + 1e-6
        assert_close(tensor, got[tensor].double(), want, budget)
