"""`invert_index` lists the rows of each token, `add_rows` sums them, `count_pairs` counts pairs."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.close import assert_close, max_error
from torch import Tensor

from hf_moe_ep.ops import permute, reference, sum_check, triton_mlp
from hf_moe_ep.ops.permute import add_rows, count_pairs, invert_index

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# name: (tokens, slots, hidden, token of each row). A token repeats at most `slots` times.
CASES = {
    "docstring": (2, 2, 5, [1, 0, 1]),
    "odd sizes": (7, 3, 11, [6, 0, 3, 3, 6, 2, 6, 5, 0, 3]),
    "a token without rows": (4, 1, 3, [3, 0, 1]),
    "every row on one token": (3, 5, 2, [1, 1, 1, 1, 1]),
    "no rows": (3, 2, 5, []),
    "no tokens": (0, 2, 5, []),
    "one": (1, 1, 1, [0]),
}


def _make_layout(name: str, device: str = "cpu") -> tuple[Tensor, Tensor, int]:
    """Return token_of_row_N, row_TJ and H of a case. row_TJ is computed without `invert_index`."""
    tokens, slots, hidden, token_of_row = CASES[name]
    table = [[len(token_of_row)] * slots for _ in range(tokens)]
    for row, token in enumerate(token_of_row):
        table[token][token_of_row[:row].count(token)] = row
    row_TJ = torch.tensor(table, dtype=torch.int64).reshape(tokens, slots)
    return torch.tensor(token_of_row, dtype=torch.int64).to(device), row_TJ.to(device), hidden


def test_the_example_of_the_docstring_is_right() -> None:
    token_of_row_N = torch.tensor([1, 0, 1])
    row_TJ = invert_index(token_of_row_N, torch.tensor([0, 0, 1]), (2, 2))
    assert row_TJ.tolist() == [[1, 3], [0, 2]]
    r_NH = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [70.0, 80.0, 90.0]])
    assert add_rows(r_NH, token_of_row_N, row_TJ).tolist() == [[4, 5, 6], [71, 82, 93]]


@pytest.mark.parametrize("name", CASES)
def test_invert_index_places_every_row_once_and_pads_with_n(name: str) -> None:
    token_of_row_N, want_TJ, _ = _make_layout(name)
    tokens = token_of_row_N.tolist()
    slot_of_row = [tokens[:row].count(token) for row, token in enumerate(tokens)]
    column_of_row_N = torch.tensor(slot_of_row, dtype=torch.int64)
    got_TJ = invert_index(token_of_row_N, column_of_row_N, tuple(want_TJ.shape))
    assert torch.equal(got_TJ, want_TJ)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_the_reference(name: str, device: str) -> None:
    token_of_row_N, row_TJ, hidden = _make_layout(name, device)
    tokens, num_rows = row_TJ.shape[0], token_of_row_N.numel()
    x_TH = torch.randn(tokens, hidden, dtype=torch.float64, device=device).requires_grad_()
    r_NH = torch.randn(num_rows, hidden, dtype=torch.float64, device=device)
    out_TH = add_rows(r_NH, token_of_row_N, row_TJ)
    # The reference cannot stack zero rows. The sum is empty in this case.
    want_TH = reference.sum_rows(r_NH, token_of_row_N, tokens) if tokens else x_TH.detach()
    assert_close("add_rows", out_TH, want_TH, 1e-12)
    # add_rows is the gradient of the copy.
    x_TH.index_select(0, token_of_row_N).backward(r_NH)
    assert x_TH.grad is not None
    assert_close("grad of the copy", x_TH.grad, out_TH, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_torch(dtype: torch.dtype, device: str) -> None:
    tokens, slots, hidden = 13, 7, 37
    token_of_row_N = torch.arange(tokens).repeat(slots)[torch.randperm(tokens * slots)]
    order_N = token_of_row_N.argsort(stable=True)
    row_TJ = order_N.view(tokens, slots)
    rows_NH = torch.randn(tokens * slots, hidden).to(dtype)
    truth_TH = reference.sum_rows(rows_NH.double(), token_of_row_N, tokens)
    plain_TH = reference.sum_rows(rows_NH, token_of_row_N, tokens)
    got_TH = add_rows(rows_NH.to(device), token_of_row_N.to(device), row_TJ.to(device))
    assert got_TH.dtype == dtype
    assert max_error(got_TH, truth_TH) <= 2 * max_error(plain_TH, truth_TH)
    if dtype != torch.float32:  # added in fp32 and rounded once: half a unit in the last place
        unit = torch.finfo(dtype).eps
        error_TH = (got_TH.cpu().double() - truth_TH).abs()
        assert (error_TH <= 0.51 * unit * truth_TH.abs() + 1e-6).all()  # 1e-6: fp32 sums


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_give_the_same_sums(device: str) -> None:
    token_of_row_N, row_TJ, _ = _make_layout("odd sizes", device)
    # Expanded rows have strides of 0, like the gradient of a sum.
    ones_NH = torch.ones((), dtype=torch.float64, device=device).expand(10, 11)
    counts_T = torch.bincount(token_of_row_N, minlength=7).double()
    want_TH = counts_T.unsqueeze(1).expand(7, 11)
    assert torch.equal(add_rows(ones_NH, token_of_row_N, row_TJ), want_TH)
    transposed_NH = torch.randn(11, 10, dtype=torch.float64, device=device).t()
    want_TH = add_rows(transposed_NH.contiguous(), token_of_row_N, row_TJ)
    assert torch.equal(add_rows(transposed_NH, token_of_row_N, row_TJ), want_TH)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_repeats_bit_for_bit(device: str) -> None:
    rows_NH = torch.randn(4096, 33, device=device)
    token_of_row_N = torch.arange(512, device=device).repeat(8)
    row_TJ = token_of_row_N.argsort(stable=True).view(512, 8)
    first_TH = add_rows(rows_NH, token_of_row_N, row_TJ)
    for _ in range(3):
        assert torch.equal(add_rows(rows_NH, token_of_row_N, row_TJ), first_TH)


def test_count_pairs_counts_the_pairs_of_each_expert() -> None:
    ids_TK = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert count_pairs(ids_TK, 5).tolist() == [2, 1, 0, 3, 0]
    assert count_pairs(ids_TK[:0], 5).tolist() == [0] * 5
    assert count_pairs(ids_TK.t(), 4).tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_have_columns_behind_them_and_sums_another_dtype(device: str) -> None:
    """Dispatch receives gradients with other columns behind them, and sums bf16 rows in fp32."""
    generator = torch.Generator().manual_seed(0)
    token_of_row_N = torch.tensor([0, 2, 0, 2, 2], dtype=torch.int32)
    row_TJ = torch.tensor([[0, 2, 5], [5, 5, 5], [1, 3, 4]], dtype=torch.int32)
    joined = torch.randn(5, 48, generator=generator).bfloat16()
    want_TH = torch.zeros(3, 32)
    for row, token in zip(joined[:, :32].float(), token_of_row_N.tolist(), strict=True):
        want_TH[token] += row
    tensors = (x.to(device) for x in (joined, token_of_row_N, row_TJ))
    joined, token_of_row_N, row_TJ = tensors
    for dtype in (torch.float32, torch.bfloat16, None):
        got_TH = add_rows(joined[:, :32], token_of_row_N, row_TJ, dtype)
        assert got_TH.dtype == (dtype or torch.bfloat16)
        assert torch.equal(got_TH.cpu(), want_TH.to(got_TH.dtype))


class _OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no Triton kernel run, and forget earlier checks and warnings before and after."""
    caches = (sum_check.check_sums_once, permute._warn_once)
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _sum_on_gpu_twice(**options: Any) -> list[str]:
    """Check the sums of rows that are on a GPU, two times; return the texts of all warnings."""
    token_of_row_N, row_TJ, hidden = _make_layout("odd sizes")
    rows_NH = torch.randn(len(token_of_row_N), hidden)
    want_TH = add_rows(rows_NH, token_of_row_N, row_TJ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (rows_NH, rows_NH.t().contiguous().t()):
            on_gpu = rows.as_subclass(_OnGpu)
            got_TH = add_rows(on_gpu, token_of_row_N, row_TJ, **options)
            assert torch.equal(got_TH.as_subclass(torch.Tensor), want_TH)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("missing", ["Triton", "a C compiler"])
def test_torch_sums_the_rows_if_the_kernel_cannot_be_built(
    missing: str, monkeypatch: pytest.MonkeyPatch, without_kernels: None
) -> None:
    """The sums are right, and there is one warning. If torch was requested, there is none."""
    reason = "triton is not installed"
    if missing == "Triton":
        find_spec = importlib.util.find_spec
        for name in ("hf_moe_ep.ops.sum_check", "hf_moe_ep.ops.kernels.reduce"):
            monkeypatch.setitem(sys.modules, name, None)  # importing these modules is an error
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
        )
    else:

        def fail_to_build(*args: Any) -> None:
            raise RuntimeError(f"{reason}\nmore lines")

        reason = "Failed to find C compiler"
        monkeypatch.setattr(sum_check, "combine", fail_to_build)
    assert _sum_on_gpu_twice(triton=False) == []
    (message,) = _sum_on_gpu_twice()
    assert "so torch sums them" in message and message.endswith(reason)
