"""`join_columns` stores matrices side by side bit by bit, and `split_columns` returns them."""

import pytest
import torch

from hf_moe_ep.ops.columns import ALIGNMENT, join_columns, split_columns

HALF = [torch.bfloat16, torch.float16]


def test_the_example_of_the_docstring_is_right() -> None:
    left_XH = torch.arange(12.0).view(2, 6).bfloat16()
    right_XP = torch.tensor([[0.1, 2.0**24 - 1], [-3.0, 1e30]])
    joined = join_columns(left_XH, right_XP)
    assert joined.shape == (2, 16) and joined.dtype == torch.bfloat16
    assert torch.equal(joined[:, :6], left_XH)
    assert torch.equal(joined[:, 6:10].contiguous().view(torch.float32), right_XP)


@pytest.mark.parametrize(
    ("left_dtype", "right_dtype"),
    [(dtype, wide) for dtype in HALF for wide in (torch.float32, torch.float64)]
    + [(torch.float32, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("hidden", [16, 7, 1])
@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (0, 3), (4, 1)])
def test_both_matrices_are_restored_bit_by_bit(
    left_dtype: torch.dtype, right_dtype: torch.dtype, hidden: int, rows: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = [
        torch.randint(256, (rows, n * dtype.itemsize), dtype=torch.uint8, generator=generator)
        for n, dtype in ((hidden, left_dtype), (columns, right_dtype))
    ]
    left, right = (b.view(dtype) for b, dtype in zip(bits, (left_dtype, right_dtype), strict=True))
    joined = join_columns(left, right)
    assert joined.shape[1] % ALIGNMENT == 0 and joined.is_contiguous()
    # An exchange between ranks selects rows in this way.
    selected = joined.index_select(0, torch.arange(rows).flip(0))
    for got, want in zip(split_columns(selected, hidden, columns, right_dtype), bits, strict=True):
        assert got.untyped_storage().data_ptr() == selected.untyped_storage().data_ptr()
        assert torch.equal(got.contiguous().view(torch.uint8), want.flip(0))


def test_rows_of_a_model_begin_at_aligned_addresses() -> None:
    """Qwen3-30B has 2,048 columns of bf16, and 8 weights and 8 ids in fp32. No column is unused."""
    joined = join_columns(torch.zeros(3, 2048, dtype=torch.bfloat16), torch.zeros(3, 16))
    assert joined.shape == (3, 2048 + 32)
    rows, routing = split_columns(joined, 2048, 16, torch.float32)
    assert rows.stride(0) * rows.element_size() % 16 == 0
    assert routing.storage_offset() * routing.element_size() % 16 == 0


def test_a_matrix_expanded_from_one_number_can_be_joined() -> None:
    """Autograd passes expanded gradients. An empty expanded gradient keeps its strides of 0."""
    for rows in (0, 2):
        joined = join_columns(torch.zeros(rows, 16).bfloat16(), torch.ones(()).expand(rows, 3))
        _, right = split_columns(joined, 16, 3, torch.float32)
        assert torch.equal(right, torch.ones(rows, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [7, 16])
def test_casts_while_joining_equal_casts_before(dtype: torch.dtype, hidden: int) -> None:
    rows, weights = torch.randn(5, hidden), torch.rand(5, 3).bfloat16()
    ids = torch.tensor([[0, 255, 257]]).expand(5, 3)
    wide = torch.float32
    got = join_columns(rows, weights, ids, dtype=dtype, right_dtype=wide)
    want = join_columns(rows.to(dtype), weights.to(wide), ids.to(wide))
    assert got.shape == want.shape and got.dtype == dtype
    for ours, theirs in zip(*(split_columns(x, hidden, 6, wide) for x in (got, want))):
        assert torch.equal(ours, theirs)
