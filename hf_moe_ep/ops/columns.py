"""Join two matrices of different dtypes, a left and a right one, into one matrix without rounding.

A row of hidden states and its routing weights have different dtypes. If they are joined in one
matrix, one kernel copies them and one transfer sends them. The bytes of the right matrix are read
as elements of the left matrix's dtype. In this example bf16 has 2 bytes and fp32 has 4, so one
number of the right matrix takes two columns:

    left [X, 6] in bf16, right [X, 2] in fp32     columns 0 to 5     left
                                                  columns 6 to 9     right
                                                  columns 10 to 15   unused

The number of columns of the joined matrix is a multiple of ALIGNMENT, so each row of this matrix
begins at an aligned address. The right part of each row begins at an aligned address too if the
number of left columns is a multiple of ALIGNMENT. Models choose such numbers for tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16


def join_columns(
    left_XH: Tensor,
    *right: Tensor,
    dtype: torch.dtype | None = None,
    right_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return one matrix with the columns of `left_XH`, followed by the columns of all `right`.

    The left columns get `dtype`, by default the dtype of `left_XH`. The right columns get
    `right_dtype`, by default the dtype of the first right matrix. Matrices of other dtypes are cast
    while they are copied. The size of right elements must be a multiple of the size of left
    elements.
    """
    right_dtype = right_dtype or right[0].dtype
    if left_XH.dtype != (dtype or left_XH.dtype) or any(x.dtype != right_dtype for x in right):
        return _cast_columns(left_XH, right, dtype or left_XH.dtype, right_dtype)
    num_rows, hidden = left_XH.shape
    ratio = _compute_ratio(left_XH, right[0].dtype)
    num_right = sum(matrix.shape[1] for matrix in right)
    start, width = _find_columns(hidden, num_right, ratio)
    gap, end = start - hidden, width - start - num_right * ratio
    # `view(dtype)` refuses the strides of 0 that an empty matrix may have, but accepts a vector.
    vectors = (matrix.contiguous().view(-1).view(left_XH.dtype) for matrix in right)
    parts = [
        left_XH,
        left_XH.new_empty(num_rows, gap),
        *(x.view(num_rows, m.shape[1] * ratio) for x, m in zip(vectors, right, strict=True)),
        left_XH.new_empty(num_rows, end),
    ]
    return torch.cat([part for part in parts if part.shape[1]], dim=1)


def _cast_columns(
    left_XH: Tensor, right: Sequence[Tensor], dtype: torch.dtype, right_dtype: torch.dtype
) -> Tensor:
    """Join the columns as `join_columns` does, and cast each matrix while it is copied."""
    num_rows, hidden = left_XH.shape
    ratio = _compute_ratio(left_XH.new_empty(0, dtype=dtype), right_dtype)
    start, width = _find_columns(hidden, sum(matrix.shape[1] for matrix in right), ratio)
    joined = left_XH.new_empty(num_rows, width, dtype=dtype)
    joined[:, :hidden].copy_(left_XH)
    columns, first = joined.view(right_dtype), start // ratio
    for matrix in right:
        columns[:, first : first + matrix.shape[1]].copy_(matrix)
        first += matrix.shape[1]
    return joined


def split_columns(
    joined_XI: Tensor, hidden: int, num_right: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return views of the left columns and of the right columns, which have the dtype `dtype`."""
    ratio = _compute_ratio(joined_XI, dtype)
    start, width = _find_columns(hidden, num_right, ratio)
    assert joined_XI.shape[1] == width, f"{joined_XI.shape[1]} columns instead of {width}"
    right_XX = joined_XI[:, start : start + num_right * ratio].view(dtype)
    return joined_XI[:, :hidden], right_XX


def _compute_ratio(left: Tensor, right_dtype: torch.dtype) -> int:
    ratio, rest = divmod(right_dtype.itemsize, left.element_size())
    assert ratio and not rest, f"{right_dtype} does not fit into elements of {left.dtype}"
    return ratio


def _find_columns(hidden: int, num_right: int, ratio: int) -> tuple[int, int]:
    """Return the first right column, and the number of columns of the joined matrix."""
    start = hidden + -hidden % ratio
    end = start + num_right * ratio
    return start, end + -end % ALIGNMENT
