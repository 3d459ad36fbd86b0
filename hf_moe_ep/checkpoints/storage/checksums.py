"""Compute checksums of sharded tensors: mix the bits of each element, and add up all elements.

A sum does not depend on the order of its summands, so the sums of the shards add up to the sum of
the whole tensor at any layout. Each summand must depend on the element and on its position in the
whole tensor. Such a checksum detects accidental changes, but does not protect against an attacker.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.ranks.collectives import sum_over_ranks

# The seeds of two independent sums.
SEEDS = (1, 0x5851F42D4C957F2D)


def mix_bits(x: Tensor) -> Tensor:
    """Make every bit of the result depend on all bits of x (int64), by splitmix64.

    Source: Steele, Lea, Flood, OOPSLA 2014.
    """
    x = x * _as_signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _as_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def sum_over_shards(sums: Tensor, like: Tensor) -> Tensor:
    """Add up the `sums` that each rank has computed on its shards of tensors sharded as `like`."""
    if not isinstance(like, DTensor):
        return sums
    mesh = like.device_mesh
    # FSDP2 may offload parameters to the host, but the process groups communicate on the device.
    total = sums.to(mesh.device_type)
    for axis, placement in enumerate(like.placements):
        if not isinstance(placement, Replicate):
            total = sum_over_ranks(total, mesh.get_group(axis))
    return total


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift int64 values to the right as if they were unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _as_signed(number: int) -> int:
    return number - (1 << 64)
