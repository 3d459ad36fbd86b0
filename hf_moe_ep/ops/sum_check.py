"""The compiled sums of rows against torch's, and what makes a difference an error.

Of a row's experts in `self_check`; here, of the rows of a token that come home to it, whose number
is not that of its choices. A kind is checked once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hf_moe_ep.ops import triton_mlp
from hf_moe_ep.ops.devices import on_its_device
from hf_moe_ep.ops.kernels.reduce import combine

# Largest error, relative to the largest element, in roundings of what is rounded to.
ROUNDINGS = 8
# Of a number: its name, ours, torch's.
Number = tuple[str, Tensor, Tensor]


@dataclass(frozen=True)
class Sums:
    """What the sum of the rows of a token is built for: of at most `num_slots` rows."""

    device: torch.device
    dtype: torch.dtype
    num_slots: int
    hidden: int


def self_check_sums(rows_NH: Tensor, num_slots: int) -> None:
    """Compare the sums of up to `num_slots` rows of `rows_NH` with torch's, once per kind.

    Raises:
        RuntimeError: where they are something else.
    """
    if not triton_mlp.interpreted():
        check_sums_once(Sums(rows_NH.device, rows_NH.dtype, num_slots, rows_NH.shape[1]))


@functools.cache
def check_sums_once(kind: Sums) -> None:
    """Compare sums of a kind with torch; see `self_check_sums`."""
    limit = ROUNDINGS * torch.finfo(kind.dtype).eps
    compare(unweighted_sums(kind), limit, kind, "Install another version of Triton")


def unweighted_sums(kind: Sums) -> Iterator[Number]:
    """(name, ours, torch's in fp64) of the sums of the rows of a few tokens."""
    rows_AH, slots_RK, y_RKH = chosen(kind)
    yield "sums", on_its_device(combine)(rows_AH, slots_RK, None), y_RKH.sum(1)


def chosen(kind: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """rows_AH, slots_RK of three rows, the last of which has none, and what they choose in fp64."""
    num_rows, num_pairs = 3, 2 * kind.num_slots
    generator = torch.Generator(kind.device).manual_seed(0)
    shape = (num_pairs, kind.hidden)
    rows_AH = torch.randn(shape, generator=generator, device=kind.device).to(kind.dtype)
    numbers = torch.arange(num_rows * kind.num_slots, dtype=torch.int32, device=kind.device)
    slots_RK = numbers.view(num_rows, kind.num_slots).clamp(max=num_pairs)
    padded_AH = torch.cat([rows_AH, rows_AH.new_zeros(1, kind.hidden)]).double()
    return rows_AH, slots_RK, padded_AH[slots_RK.long()]


def compare(found: Iterable[Number], limit: float, kind: Any, way_out: str) -> None:
    """Raise where numbers of a kind differ by more than `limit` of the largest; integers by any.

    Raises:
        RuntimeError: names the number, the error and `way_out`.
    """
    for name, got, want in found:
        error = _error(got, want)
        if not error <= (limit if got.is_floating_point() else 0):
            raise RuntimeError(
                f"the Triton kernels of hf_moe_ep compute wrong numbers on "
                f"{name_of(kind.device)} with Triton {triton.__version__}: error "
                f"{error:.1e} in {name} ({kind}), at most {limit:.1e} is rounding. "
                f"{way_out}, and report this line"
            )


def name_of(device: torch.device) -> str:
    """The GPU's name, or what torch calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _error(got: Tensor, want: Tensor) -> float:
    scale = want.double().abs().max().item()
    return (got.double() - want.double()).abs().max().item() / (scale or 1.0)
