"""Sum, for each token, the rows that are copies of the token.

Row n is a copy of the token `token_of_row_N[n]`. `invert_index` computes the inverse, `row_TJ`: the
numbers of each token's rows, padded with N ("no row"). In this example there is one copy of token 0
and there are two copies of token 1:

    token_of_row_N = [1, 0, 1]        row_TJ = [[1, 3],
                                                [0, 2]]

    add_rows(r) = [r1, r0 + r2]

`add_rows` is the backward of x.index_select(0, token_of_row_N). Rows are added in fp32 or wider and
always in the same order, so repeated calls give equal bits. On a GPU a Triton kernel computes the
sums. Torch computes them if Triton is missing or cannot build the kernel. `count_pairs` counts the
(row, expert) pairs of each expert.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from hf_moe_ep.ops.devices import make_device_current


def add_rows(
    rows_NH: Tensor,
    token_of_row_N: Tensor,
    row_TJ: Tensor,
    dtype: torch.dtype | None = None,
    *,
    triton: bool = True,
) -> Tensor:
    """Return out_TH, where `out_TH[t]` is the sum of the copies of token t.

    Sums are rounded to `dtype`, or to the dtype of the rows. The function is not differentiable.
    If `triton` is False, torch computes the sums on a GPU as well.
    """
    dtype = dtype or rows_NH.dtype
    num_tokens, hidden = row_TJ.shape[0], rows_NH.shape[1]
    has_kernel = triton and torch.float64 not in (dtype, rows_NH.dtype) and num_tokens > 0
    if rows_NH.is_cuda and has_kernel:
        if rows_NH.stride(1) != 1:
            rows_NH = rows_NH.contiguous()
        reason = _explain_missing_kernel(rows_NH, row_TJ.shape[1], dtype)
        if not reason:
            # The kernel is imported on demand, because not every machine has Triton.
            from hf_moe_ep.ops.kernels.reduce import combine

            return make_device_current(combine)(rows_NH, row_TJ.contiguous(), None, dtype)
        _warn_once(rows_NH.device, reason)
    wide_dtype = torch.promote_types(torch.promote_types(rows_NH.dtype, dtype), torch.float32)
    out_TH = rows_NH.new_zeros(num_tokens, hidden, dtype=wide_dtype)
    if not rows_NH.is_cuda:
        # On a CPU index_add_ adds rows in their order, but on a GPU the order changes at each call.
        out_TH.index_add_(0, token_of_row_N, rows_NH.to(wide_dtype))
        return out_TH.to(dtype)
    padded_NH = torch.cat([rows_NH.to(wide_dtype), out_TH.new_zeros(1, hidden)])
    for row_T in row_TJ.unbind(1):
        out_TH += padded_NH.index_select(0, row_T)
    return out_TH.to(dtype)


def _explain_missing_kernel(rows_NH: Tensor, rows_per_sum: int, dtype: torch.dtype) -> str:
    """Return the reason why the kernel cannot sum these rows, or "" if the kernel can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from hf_moe_ep.ops.sum_check import self_check_sums

    return self_check_sums(rows_NH, rows_per_sum, dtype)


@functools.cache
def _warn_once(device: torch.device, reason: str) -> None:
    """Warn that torch computes the sums instead of the kernel."""
    warnings.warn(
        f"the Triton kernel of hf_moe_ep that sums the rows of each token cannot run on {device}, "
        f"so torch sums them, which is slower: {reason}",
        stacklevel=2,
    )


def invert_index(token_of_row_N: Tensor, column_of_row_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return row_TJ, with n at `[token_of_row_N[n], column_of_row_N[n]]` and N everywhere else."""
    num_rows = token_of_row_N.numel()
    row_TJ = token_of_row_N.new_full(shape, num_rows)
    row_TJ[token_of_row_N, column_of_row_N] = torch.arange(num_rows, device=row_TJ.device)
    return row_TJ


def count_pairs(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Count the pairs of each expert, as int64 on the device and without a host sync."""
    ids = expert_ids_TK.flatten()
    if not ids.is_cuda:
        return torch.bincount(ids, minlength=num_experts)
    # On a GPU bincount causes a host sync, because the host reads the largest id.
    return ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))
