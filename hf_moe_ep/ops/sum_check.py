"""Compare the sums of the Triton kernel that adds up the rows of a token with torch's sums.

Dispatch copies a token once for each rank to which the token goes, and `permute.add_rows` sums the
rows that these ranks send back. `self_check_sums` checks the kernel of `add_rows`, once per process
for each `TokenSumKind`, because Triton compiles another kernel for each kind. `self_check.py` uses
the other functions of this module as well.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.devices import make_device_current
from hf_moe_ep.ops.kernels.reduce import combine

# The largest allowed error relative to the largest element, in multiples of the dtype's epsilon.
ROUNDINGS = 8
# The end of the message about wrong numbers.
USE_TORCH = "Train with experts_backend='torch'"
# Errors of Triton, its compilers and ptxas for a kernel that cannot be built or does not fit.
_BUILD_ERRORS = (triton.TritonError, RuntimeError, OSError, subprocess.SubprocessError)
# (name, our tensor, torch's tensor in fp64 or of integers)
Comparison = tuple[str, Tensor, Tensor]


@dataclass(frozen=True)
class TokenSumKind:
    """The properties that decide which kernel Triton builds for sums of up to `rows_per_sum` rows.

    `row_stride` is the distance between two rows in elements (None: the rows are contiguous), and
    `out_dtype` is the dtype of the sums (None: the dtype of the rows).
    """

    device: torch.device
    dtype: torch.dtype
    rows_per_sum: int
    hidden: int
    row_stride: int | None = None
    out_dtype: torch.dtype | None = None


def self_check_sums(rows_NH: Tensor, rows_per_sum: int, out_dtype: torch.dtype) -> str:
    """Check the kernel for rows of the dtype, width, strides and device of `rows_NH`.

    Each sum has up to `rows_per_sum` rows and is rounded to `out_dtype`. If Triton interprets its
    kernels, nothing is checked. Returns the reason why the kernel cannot be built, or "".

    Raises:
        RuntimeError: the sums are wrong.
    """
    if triton_mlp.interpreted():
        return ""
    hidden, row_stride = rows_NH.shape[1], rows_NH.stride(0)
    return check_sums_once(
        TokenSumKind(rows_NH.device, rows_NH.dtype, rows_per_sum, hidden, row_stride, out_dtype)
    )


@functools.cache
def check_sums_once(kind: TokenSumKind) -> str:
    """Check the kernel of this kind (see `self_check_sums`). The cache skips known kinds."""
    comparisons, reason = try_to_build(lambda: compare_token_sums(kind))
    limit = ROUNDINGS * torch.finfo(kind.out_dtype or kind.dtype).eps
    check_close(comparisons, limit, kind, USE_TORCH)
    return reason


def try_to_build(
    compare: Callable[[], Iterable[Comparison]],
) -> tuple[list[Comparison], str]:
    """Return the comparisons and "", or no comparison and the reason why a kernel is missing."""
    try:
        return list(compare()), ""
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _BUILD_ERRORS as error:
        return [], f"{type(error).__name__}: {error}".splitlines()[0]


def compare_token_sums(kind: TokenSumKind) -> Iterator[Comparison]:
    """Yield one comparison: the sums for three tokens, by the kernel and by torch."""
    rows_AH, position_RK, y_RKH = draw_rows_and_positions(kind)
    actual_RH = make_device_current(combine)(rows_AH, position_RK, None, kind.out_dtype)
    yield "sums", actual_RH, y_RKH.sum(1)


def draw_rows_and_positions(kind: TokenSumKind) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs for three sums of K = `rows_per_sum` rows: rows_AH, position_RK and y_RKH.

    rows_AH has A = 2 K random rows. position_RK has the numbers of the rows that are summed: 0 to
    K - 1 for the first sum, K to 2 K - 1 for the second sum. The third sum is empty: all its
    positions are A, which means "no row". y_RKH has the rows at these positions in fp64, and zeros
    at the positions A.
    """
    num_sums, num_pairs = 3, 2 * kind.rows_per_sum
    generator = torch.Generator(kind.device).manual_seed(0)
    shape = (num_pairs, max(kind.row_stride or 0, kind.hidden))
    stored_AX = torch.randn(shape, generator=generator, device=kind.device).to(kind.dtype)
    rows_AH = stored_AX[:, : kind.hidden]
    numbers = torch.arange(num_sums * kind.rows_per_sum, dtype=torch.int32, device=kind.device)
    position_RK = numbers.view(num_sums, kind.rows_per_sum).clamp(max=num_pairs)
    padded_AH = torch.cat([rows_AH, rows_AH.new_zeros(1, kind.hidden)]).double()
    return rows_AH, position_RK, padded_AH[position_RK.long()]


def check_close(comparisons: Iterable[Comparison], limit: float, kind: Any, fix: str) -> None:
    """Check that integer tensors are equal, and that float tensors are close.

    A float may differ by at most `limit` times the largest magnitude in torch's tensor.

    Raises:
        RuntimeError: a difference is larger. The message has the tensor's name and `fix`.
    """
    for name, actual, expected in comparisons:
        scale = expected.double().abs().max().item() or 1.0
        error = (actual.double() - expected.double()).abs().max().item() / scale
        if not error <= (limit if actual.is_floating_point() else 0):
            raise RuntimeError(
                f"the Triton kernels of hf_moe_ep compute wrong numbers on "
                f"{describe_device(kind.device)} with Triton {triton.__version__}: error "
                f"{error:.1e} in {name} ({kind}), but rounding explains at most {limit:.1e}. "
                f"{fix}, and report this message"
            )


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or torch's name of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
