"""MXFP4 weights of the hub (gpt-oss), read as what a model trains in: only a rank's own experts.

A weight [E, in, out] of a model lies in a checkpoint as two tensors. 32 neighbours along `in` have
one scale; a byte holds two of them, the first in its low bits:

    down_proj_blocks  [E, out, in / 32, 16]   byte 0x72: numbers 2 and 7, so 1.0 and 6.0
    down_proj_scales  [E, out, in / 32]       130: times 2 ** (130 - 127)

The numbers are the 16 of E2M1, a bit of sign, two of exponent and one of mantissa (OCP
Microscaling Formats, section 5.3.3). transformers decodes the same with
Mxfp4Config(dequantize=True).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.storage.boxes import Box, slices
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BYTES = 32, 16
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# How many numbers are decoded at once: each of them takes some 9 bytes meanwhile.
_VALUES = 1 << 18
_NUMBERS = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))


@dataclass(frozen=True)
class Packed:
    """A weight [E, in, out] of which a checkpoint has blocks and their scales."""

    blocks: Entry
    scales: Entry

    def read_into(self, target: Tensor, box: Box, reader: Reader) -> None:
        """Decode the part `box` of the weight into `target`, in its dtype; some rows at a time."""
        (first, end), inner, out = box
        groups = inner[0] // _BLOCK, -(-inner[1] // _BLOCK)
        decoded = groups[0] * _BLOCK, groups[1] * _BLOCK
        (wanted,) = slices((inner,), (decoded,))
        step = max(1, _VALUES // max(1, decoded[1] - decoded[0]))
        for expert, start in product(range(first, end), range(*out, step)):
            rows = (start, min(start + step, out[1]))
            held = ((expert, expert + 1), rows, groups)
            scales = reader.read(self.scales, held)[0]
            blocks = reader.read(self.blocks, (*held, (0, _BYTES)))[0]
            values = _decode(blocks, scales, target.dtype).flatten(1)
            at = slice(rows[0] - out[0], rows[1] - out[0])
            target[expert - first, :, at].copy_(values[:, wanted].T)


def packed_keys(key: str) -> tuple[str, str]:
    """Return the keys of blocks and scales of a weight."""
    return key + _BLOCKS, key + _SCALES


def find_packed(key: str, shape: tuple[int, ...], entries: Mapping[str, Entry]) -> Packed | None:
    """Find the blocks of a weight in a checkpoint, None where it has none.

    Raises:
        ValueError: they are of another shape than the weight, or without scales.
    """
    blocks, scales = packed_keys(key)
    if blocks not in entries:
        return None
    if scales not in entries:
        raise ValueError(f"missing 1 tensors: {scales}, and {blocks} is there")
    experts, inner, out = shape if len(shape) == 3 else (0, 0, 0)
    wanted = (experts, out, inner // _BLOCK)
    found = entries[blocks].shape, entries[scales].shape
    if inner % _BLOCK or found != ((*wanted, _BYTES), wanted):
        raise ValueError(
            f"misshapen: {blocks} {found[0]} and {scales} {found[1]} do not make up {key} {shape}, "
            f"which would be {(*wanted, _BYTES)} and {wanted}"
        )
    if any(entries[name].dtype != torch.uint8 for name in (blocks, scales)):
        raise ValueError(f"{blocks} is {entries[blocks].dtype}, and MXFP4 is of bytes")
    return Packed(entries[blocks], entries[scales])


def _decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode [.., G, 16] bytes with [.., G] scales to [.., G, 32] numbers."""
    pairs = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    numbers = torch.tensor(_NUMBERS, dtype=dtype)[pairs.int()]
    return torch.ldexp(numbers, scales.int().sub(_BIAS).unsqueeze(-1)).to(dtype)
