"""Quantised values equal the values of bitsandbytes.

Products with quantised matrices equal products with dequantised matrices.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import ADAPTERS, GPT_OSS, Case, draw_ids, draw_with_adapters
from support.close import assert_close
from support.fp64 import FP64
from support.hub_files import assert_equal
from support.largest_tensor import LargestTensor
from torch import Tensor

from hf_moe_ep.ops import quantised, torch_mlp
from hf_moe_ep.ops.expert_mlp import expert_mlp, postpone_grads
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.quantised import (
    Quantisation,
    allocate_stack,
    can_cut_rows,
    check_available,
    check_sizes,
    dequantise,
    quantise,
    quantise_stack,
)

NF4, NESTED, FP8 = Quantisation("nf4"), Quantisation("nf4", nested=True), Quantisation("fp8")
FORMATS = {"nf4": NF4, "nf4 nested": NESTED, "fp8": FP8}
HALF = (torch.float32, torch.bfloat16, torch.float16)
Named = dict[str, Tensor | None]


def draw_matrices(dtype: torch.dtype, shape: tuple[int, int, int] = (3, 128, 256)) -> Tensor:
    """Draw experts of different magnitudes, one with a block of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.tensor([1.0, 1e-3, 50.0])[: shape[0], None, None]
    weight[0, :, :128] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_equals_bitsandbytes(nested: bool, dtype: torch.dtype) -> None:
    """The test compares the bytes, scales and values of every expert."""
    functional = pytest.importorskip("bitsandbytes.functional")
    # The 1044 scales of an expert are four blocks of 256 scales and a block of 20 scales.
    weight_LOI = draw_matrices(dtype, (3, 348, 192))
    stack = quantise_stack(weight_LOI, Quantisation("nf4", nested=nested))
    for expert, weight_OI in enumerate(weight_LOI):
        packed, state = functional.quantize_4bit(
            weight_OI, blocksize=64, quant_type="nf4", compress_statistics=nested
        )
        matrix = stack.matrix_of(expert)
        assert torch.equal(matrix.values.flatten(), packed.flatten())
        assert torch.equal(matrix.block_scale.flatten(), state.absmax.flatten())
        if nested:
            assert matrix.nested_scale is not None and len(matrix.nested_scale) == 5
            assert torch.equal(matrix.nested_scale[:, 0], state.state2.absmax)
            assert (matrix.nested_scale[:, 1] == state.offset).all()
            # Up to 0.49, bitsandbytes overwrites this table (`support/quantised.py`).
            state.state2.code = functional.create_dynamic_map()
        want = functional.dequantize_4bit(packed, state)
        assert want.dtype == dtype and want.shape == weight_OI.shape
        assert torch.equal(dequantise(matrix, "nf4", dtype), want)


def test_nested_scales_do_not_depend_on_the_default_dtype() -> None:
    """The codes are cached, so codes in bf16 would round all scales from then on."""
    matrix = quantise(draw_matrices(torch.float32, (1, 64, 256))[0], NESTED)
    want = dequantise(matrix, "nf4", torch.float32)
    before = torch.get_default_dtype()
    quantised._make_nested_codes.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = dequantise(matrix, "nf4", torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, want)


def test_nf4_codes_equal_codes_by_hand() -> None:
    """Two rows of 64 values have all codes of the paper (arXiv 2305.14314, appendix E)."""
    codes = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
    codes += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    row = torch.tensor(codes)[torch.arange(64) % 16]
    weight_OI = torch.stack([2.0 * row, 0.5 * row])
    matrix = quantise(weight_OI, NF4)
    assert matrix.block_scale.tolist() == [[2.0], [0.5]]
    # The first of two codes is in the upper half of a byte.
    by_hand = [16 * code + code + 1 for code in range(0, 16, 2)] * 4
    assert matrix.values.tolist() == [by_hand, by_hand]
    assert_close("values", dequantise(matrix, "nf4", torch.float32), weight_OI, 1e-7)  # 8 digits


def test_fp8_scales_and_values_equal_numbers_by_hand() -> None:
    """There is one scale per 128 x 128 values, and the largest value of a block becomes 448."""
    weight_OI = torch.zeros(256, 384)
    weight_OI[0, 0], weight_OI[127, 127] = 896.0, -3.0
    weight_OI[128, 256] = 0.875
    weight_OI[255, 383] = 0.875 / 448 * 17
    matrix = quantise(weight_OI, FP8)
    scale = 0.875 / 448
    assert_close("scales", matrix.block_scale, torch.tensor([[2.0, 1, 1], [1, 1, scale]]), 1e-7)
    got = dequantise(matrix, "fp8", torch.float32)
    # e4m3 has three mantissa bits: 17 becomes 16, and -1.5 stays -1.5.
    want = weight_OI.clone()
    want[255, 383] = scale * 16
    assert_close("values", got, want, 1e-7)
    assert matrix.values.dtype == torch.uint8 and got[127, 127] == -3


@pytest.mark.parametrize("dtype", HALF)
def test_fp8_follows_the_formula(dtype: torch.dtype) -> None:
    weight_LOI = draw_matrices(dtype)
    stack = quantise_stack(weight_LOI, FP8)
    for expert, row, column in itertools.product(range(3), range(1), range(2)):
        block = weight_LOI[expert, :, 128 * column : 128 * (column + 1)].float()
        largest = block.abs().max()
        factor = 448 / largest if largest > 0 else torch.tensor(1.0)
        scale = 1 / factor
        bytes_ = (block * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
        matrix = stack.matrix_of(expert)
        assert matrix.block_scale[row, column] == scale
        got = dequantise(matrix, "fp8", dtype)[:, 128 * column : 128 * (column + 1)]
        assert torch.equal(got, (bytes_.float() * scale).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_a_value_is_computed_in_fp32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    quantisation = FORMATS[name]
    matrix = quantise(draw_matrices(torch.float64)[2], quantisation)
    wide = dequantise(matrix, quantisation.kind, torch.float32)
    assert torch.equal(dequantise(matrix, quantisation.kind, dtype), wide.to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_stored_tensors_have_the_documented_sizes(name: str) -> None:
    """Shapes are also the same on meta, and strides do not change the bytes."""
    quantisation = FORMATS[name]
    weight_LOI = draw_matrices(torch.bfloat16, (2, 512, 768))
    stack = quantise_stack(weight_LOI, quantisation)
    on_meta = quantise_stack(weight_LOI.to("meta"), quantisation)
    shapes = {n: (x.shape, x.dtype) for n, x in stack.by_name("up").items()}
    assert shapes == {n: (x.shape, x.dtype) for n, x in on_meta.by_name("up").items()}
    assert all(x.is_meta for x in on_meta.by_name("up").values())
    empty = allocate_stack((2, 512, 768), quantisation, "cpu")
    assert shapes == {n: (x.shape, x.dtype) for n, x in empty.by_name("up").items()}
    num_bytes = sum(x.nbytes for x in stack.by_name("up").values())
    wanted = {"nf4": 0.5625, "nf4 nested": 0.5 + 1 / 64 + 8 / 16384, "fp8": 1 + 4 / 16384}
    assert num_bytes / weight_LOI.numel() == wanted[name]
    assert quantisation.num_values(stack.values) == weight_LOI.numel()
    transposed = quantise_stack(weight_LOI.mT.contiguous().mT, quantisation)
    for (_, x), (_, other) in zip(stack.by_name("").items(), transposed.by_name("").items()):
        assert torch.equal(x, other)


def test_rows_can_be_split_at_block_boundaries() -> None:
    assert can_cut_rows((6, 64), NF4, 3) and not can_cut_rows((6, 64), NF4, 4)
    assert can_cut_rows((512, 128), FP8, 4) and not can_cut_rows((512, 128), FP8, 8)
    # 512 rows with 2 scales per row have 4 blocks of 256 scales.
    assert can_cut_rows((512, 128), NESTED, 4) and not can_cut_rows((512, 128), NESTED, 8)


@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_quantising_parts_of_the_rows_equals_quantising_all(name: str) -> None:
    quantisation = FORMATS[name]
    weight_OI = draw_matrices(torch.float32, (1, 384, 256))[0]
    assert can_cut_rows((384, 256), quantisation, 3)
    all_rows = quantise(weight_OI, quantisation)
    parts = [quantise(part, quantisation) for part in weight_OI.chunk(3)]
    assert torch.equal(torch.cat([part.values for part in parts]), all_rows.values)
    assert torch.equal(torch.cat([part.block_scale for part in parts]), all_rows.block_scale)


@pytest.mark.parametrize(
    ("quantisation", "shape", "words"),
    [
        (NF4, (96, 100), "nf4 has blocks of 64 along the in.*up .*in 100.*has 100"),
        (FP8, (96, 256), 'fp8 has blocks of 128 along the out.*has 96.*experts_dtype="nf4"'),
        (FP8, (128, 100), "fp8 has blocks of 128 along the in.*has 100.*in bf16"),
    ],
)
def test_sizes_that_no_block_divides_are_refused(
    quantisation: Any, shape: tuple[int, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_sizes("up", shape, quantisation)
    check_sizes("up", (256, 384), quantisation)


def test_without_bitsandbytes_nf4_is_refused_and_fp8_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    check_available(FP8)
    with pytest.raises(ImportError, match=r"pip install .bitsandbytes>=0"):
        check_available(NF4)


IDS = draw_ids(21, 2, 3, seed=4)
CALLS = {
    "silu": Case(IDS, 3, 128, 256),
    "gpt-oss": Case(IDS, 3, 128, 256, GPT_OSS, bias=True),
    "no gate": Case(IDS, 3, 128, 256, ExpertFormula(gated=False, activation="relu2")),
    "empty experts": Case([[3, 1], [1, 3], [3, 5]], 5, 128, 128),
    "no rows": Case([], 3, 128, 128),
}


def quantise_matrices(named: Named, quantisation: Quantisation | None, dtype: torch.dtype) -> Named:
    """Replace the matrices of the inputs by their quantised bytes and scales."""
    result = dict(named)
    for name in ("up", "down"):
        weight_LOI = named[name]
        assert weight_LOI is not None
        stack = quantise_stack(weight_LOI, quantisation or NF4)
        if quantisation is not None:
            result |= stack.by_name(name)
    return result


def round_matrices(named: Named, quantisation: Quantisation, dtype: torch.dtype) -> Named:
    """Replace the matrices of the inputs by their values after quantising and dequantising."""
    result = dict(named)
    for name in ("up", "down"):
        weight_LOI = named[name]
        assert weight_LOI is not None
        stack = quantise_stack(weight_LOI, quantisation)
        values = [
            dequantise(stack.matrix_of(expert), quantisation.kind, dtype)
            for expert in range(len(weight_LOI))
        ]
        result[name] = torch.stack(values)
    return result


def run_call(
    case: Case, named: Named, kind: str, *, chunks: int = 1, postpone: bool = False, **kw: Any
) -> dict[str, Tensor]:
    """Return the output and all gradients of a call with frozen matrices."""
    wanted = ("rows", "weights", "up_bias", "down_bias", *ADAPTERS)
    leaves = {
        name: None if x is None else x.detach().requires_grad_(name in wanted)
        for name, x in named.items()
    }
    rows, weights = leaves.pop("rows"), leaves.pop("weights")
    assert rows is not None and weights is not None
    experts = ExpertWeights(**leaves, up_scale=0.5, down_scale=2.0, quantised=kind)
    ids = case.ids_RK(str(rows.device))
    torch.manual_seed(7)
    grad_RH = torch.randn(rows.shape, dtype=rows.dtype).to(rows.device)
    outs = []
    for part in range(chunks):
        if postpone:
            experts = postpone_grads(experts)
        chunk = slice(part, None, chunks)
        counts_L = [int((ids[chunk] == expert).sum()) for expert in range(case.num_experts)]
        inputs = (rows[chunk], ids[chunk], weights[chunk])
        out = expert_mlp(*inputs, experts, case.formula, counts_L=counts_L, **kw)
        outs.append((out, grad_RH[chunk]))
    torch.autograd.backward([out for out, _ in outs], [grad for _, grad in outs])
    results = {f"out {part}": out.detach() for part, (out, _) in enumerate(outs)}
    for name, x in {"rows": rows, "weights": weights, **leaves}.items():
        if x is not None and name in wanted:
            assert x.grad is not None, name
            results[name] = x.grad
    return results


def _list_formats_and_calls() -> Iterator[Any]:
    """Yield all pairs of FORMATS and CALLS in three dtypes. Most of them are marked slow."""
    for name, call, dtype in itertools.product(
        FORMATS, CALLS, (torch.float32, torch.bfloat16, torch.float64)
    ):
        usual = (name, call) in (("nf4", "silu"), ("fp8", "gpt-oss")) or call == "empty experts"
        marks = [] if usual and dtype != torch.float64 else [pytest.mark.slow]
        label = f"{name}-{call}-{dtype}".replace("torch.", "")
        yield pytest.param(name, call, dtype, id=label, marks=marks)


@pytest.mark.parametrize(("name", "call", "dtype"), list(_list_formats_and_calls()))
def test_quantised_matrices_give_the_same_bits_as_dequantised_matrices(
    name: str, call: str, dtype: torch.dtype
) -> None:
    """The output and gradients are equal, also with chunks, recompute and postponed gradients."""
    quantisation, case = FORMATS[name], CALLS[call]
    named = draw_with_adapters(case, 5, dtype)
    as_bytes = quantise_matrices(named, quantisation, dtype)
    as_values = round_matrices(named, quantisation, dtype)
    for kw in ({}, {"recompute": True}, {"postpone": True}, {"postpone": True, "chunks": 2}):
        want = run_call(case, as_values, "", **kw)
        got = run_call(case, as_bytes, quantisation.kind, **kw)
        assert_equal(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_function_modes_change_no_bit(name: str) -> None:
    """A mode that is active in forward and backward sees only the operators, in both passes.

    Otherwise `FP64` would let bitsandbytes write fp32 values into a tensor of fp64.
    """
    quantisation, case = FORMATS[name], CALLS["silu"]
    named = quantise_matrices(
        draw_with_adapters(case, 5, torch.float64), quantisation, torch.float64
    )
    for kw in ({}, {"postpone": True}, {"postpone": True, "chunks": 2}):
        want = run_call(case, named, quantisation.kind, **kw)
        with FP64():
            got = run_call(case, named, quantisation.kind, **kw)
        assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "fp8"])
def test_a_compiled_call_equals_the_eager_call(name: str) -> None:
    """A function that calls the operator is compiled to one graph with equal results."""
    quantisation, case = FORMATS[name], CALLS["silu"]
    named = quantise_matrices(
        draw_with_adapters(case, 5, torch.float32), quantisation, torch.float32
    )
    ids, counts_L = case.ids_RK(), case.counts_L()

    def layer(rows: Tensor, weights: Tensor, experts: dict[str, Tensor]) -> Tensor:
        stacks = ExpertWeights(**experts, up_bias=None, down_bias=None, quantised=quantisation.kind)
        return expert_mlp(rows * 1.0, ids, weights, stacks, case.formula, counts_L=counts_L).sin()

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = {
            key: x.detach().requires_grad_(key in ("rows", *ADAPTERS))
            for key, x in named.items()
            if x is not None
        }
        rows, weights = leaves.pop("rows"), leaves.pop("weights")
        out = function(rows, weights, leaves)
        out.sum().backward()
        results.append([out, rows.grad, *(leaves[key].grad for key in ADAPTERS)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def _dequantise_all(experts: ExpertWeights, name: str, expert: int, dtype: torch.dtype) -> Tensor:
    """Return one matrix, like `ExpertWeights.matrix`, but dequantise all experts for this."""
    stack = experts.stack(name)
    values = [
        dequantise(stack.matrix_of(e), experts.quantised, dtype) for e in range(len(stack.values))
    ]
    return torch.stack(values)[expert]


@pytest.mark.parametrize("name", FORMATS)
def test_no_tensor_is_as_large_as_all_dequantised_experts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward dequantise one expert at a time. Dequantising all fails the test."""
    quantisation = FORMATS[name]
    case = Case(draw_ids(40, 2, 6, seed=3), 6, hidden=128, ffn=128)
    named = quantise_matrices(
        draw_with_adapters(case, 2, torch.float32), quantisation, torch.float32
    )
    size_of_one, size_of_all = 2 * 128 * 128, 6 * 128 * 128

    def measure_largest() -> int:
        watch = LargestTensor(x for x in named.values() if x is not None)
        inputs = dict(named)
        rows, weights = inputs.pop("rows"), inputs.pop("weights")
        assert rows is not None and weights is not None
        experts = ExpertWeights(**inputs, quantised=quantisation.kind)
        need = {"rows", "weights", *ADAPTERS}
        # The test calls the implementation, because LargestTensor cannot see inside the operator.
        with watch:
            routing = torch_mlp.route(case.ids_RK(), case.counts_L(), experts, rows)
            _, pre = torch_mlp.forward(rows, weights, experts, routing, case.formula, True)
            torch_mlp.backward(
                rows,
                rows,
                weights,
                experts,
                routing,
                pre,
                case.formula,
                grad_scale=1.0,
                need=need,
            )
        return watch.elements

    assert size_of_one <= measure_largest() < size_of_all
    monkeypatch.setattr(ExpertWeights, "matrix", _dequantise_all)
    assert measure_largest() >= size_of_all


def test_dequantised_matrices_are_not_saved_for_backward() -> None:
    """An nf4 call saves only its inputs and the routing."""
    case = CALLS["silu"]
    named = quantise_matrices(draw_with_adapters(case, 5, torch.float32), NF4, torch.float32)
    leaves = {n: None if x is None else x.requires_grad_(n in ADAPTERS) for n, x in named.items()}
    rows, weights = leaves.pop("rows"), leaves.pop("weights")
    assert rows is not None and weights is not None
    known = {x.untyped_storage().data_ptr() for x in named.values() if x is not None}
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved.append(tensor.numel())
        return tensor

    experts = replace(ExpertWeights(**leaves), quantised="nf4")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kw = {"counts_L": case.counts_L(), "recompute": True}
        out = expert_mlp(rows, case.ids_RK(), weights, experts, case.formula, **kw)
    out.sum().backward()
    assert saved and max(saved) <= 2 * len(IDS)
