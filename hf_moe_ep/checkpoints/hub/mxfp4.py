"""Decode MXFP4 weights of the hub (gpt-oss) while a rank reads its own experts.

A checkpoint stores a weight [E, in, out] as two tensors. 32 values along `in` share one scale. Each
byte has the codes of two values, and its low four bits are the code of the first value:

    key               shape                   example
    down_proj_blocks  [E, out, in / 32, 16]   the byte 0x72 has the codes 2 and 7: values 1.0, 6.0
    down_proj_scales  [E, out, in / 32]       the scale 130 multiplies both values by
                                              2 ** (130 - 127) = 8

The 16 codes have the format E2M1: one sign bit, two exponent bits, one mantissa bit (OCP
Microscaling Formats, section 5.3.3). transformers decodes the same values with
Mxfp4Config(dequantize=True).

`join_blocks` replaces both tensors by a `Mxfp4Tensor`, which decodes any box of the weight. A box
has one index range per dim (`ranks/boxes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader
from hf_moe_ep.ranks.boxes import Box, make_slices

_BLOCKS_SUFFIX, _SCALES_SUFFIX = "_blocks", "_scales"
# The number of values in a block, which share one scale, and the number of bytes of a block.
_BLOCK_VALUES, _BLOCK_BYTES = 32, 16
_SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The number of values that are decoded at a time, with about 9 bytes of temporary memory each.
_VALUES_PER_STEP = 1 << 18
_VALUE_OF_CODE = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(FileTensor):
    """A weight [E, in, out] that a checkpoint stores as packed blocks and their scales.

    `shape` is the shape of the decoded weight. The other fields of FileTensor (`file`, `dtype`,
    `start`) have the values of `blocks`.
    """

    blocks: FileTensor
    scales: FileTensor

    def read_into(
        self, out: Tensor, box: Box, *, view: tuple[int, ...], dtype: torch.dtype, reader: Reader
    ) -> None:
        """Decode a box of the weight in the dtype of `out`, some columns of one expert at a time.

        `dtype` is not used, because there is nothing to round: in bf16 and fp32 a value in E2M1
        times a power of two is exact.
        """
        assert view == self.shape, f"{view} is not {self.shape}"
        (first, end), rows, columns = box
        groups = rows[0] // _BLOCK_VALUES, -(-rows[1] // _BLOCK_VALUES)
        decoded_rows = groups[0] * _BLOCK_VALUES, groups[1] * _BLOCK_VALUES
        (in_box,) = make_slices((rows,), (decoded_rows,))
        step = max(1, _VALUES_PER_STEP // max(1, decoded_rows[1] - decoded_rows[0]))
        for expert, start in product(range(first, end), range(*columns, step)):
            chunk = (start, min(start + step, columns[1]))
            scales_box = ((expert, expert + 1), chunk, groups)
            scales = reader.read(self.scales, scales_box)[0]
            blocks = reader.read(self.blocks, (*scales_box, (0, _BLOCK_BYTES)))[0]
            values = _decode(blocks, scales, out.dtype).flatten(1)
            target = slice(chunk[0] - columns[0], chunk[1] - columns[0])
            out[expert - first, :, target].copy_(values[:, in_box].T)


def join_blocks(
    tensors: Mapping[str, FileTensor], layout: Mapping[str, list[Piece]]
) -> Mapping[str, FileTensor]:
    """Replace the blocks and scales of each packed weight by one tensor with the weight's key.

    Raises:
        ValueError: blocks have no scales, or blocks or scales do not have the shape that the weight
            needs or are not stored as uint8.
    """
    weights = [
        piece
        for pieces in layout.values()
        for piece in pieces[:1]
        if piece.key + _BLOCKS_SUFFIX in tensors
    ]
    if not weights:
        return tensors
    joined = dict(tensors)
    for weight in weights:
        joined[weight.key] = _join_blocks_and_scales(weight.key, weight.shape, tensors)
        joined.pop(weight.key + _BLOCKS_SUFFIX, None)
        joined.pop(weight.key + _SCALES_SUFFIX, None)
    return joined


def _join_blocks_and_scales(
    key: str, shape: tuple[int, ...], tensors: Mapping[str, FileTensor]
) -> Mxfp4Tensor:
    blocks_key, scales_key = key + _BLOCKS_SUFFIX, key + _SCALES_SUFFIX
    blocks, scales = tensors[blocks_key], tensors.get(scales_key)
    if scales is None:
        raise ValueError(f"missing 1 tensors: {scales_key}, the scales of {blocks_key}")
    experts, inner, out = shape if len(shape) == 3 else (0, 0, 0)
    scales_shape = (experts, out, inner // _BLOCK_VALUES)
    blocks_shape = (*scales_shape, _BLOCK_BYTES)
    fits = (blocks.shape, scales.shape) == (blocks_shape, scales_shape)
    if inner % _BLOCK_VALUES or not fits:
        raise ValueError(
            f"misshapen: {blocks_key} {blocks.shape} and {scales_key} {scales.shape} do not fit "
            f"{key} {shape}, which needs {blocks_shape} and {scales_shape}"
        )
    for name, tensor in ((blocks_key, blocks), (scales_key, scales)):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"{name} is {tensor.dtype}, but MXFP4 is stored as {torch.uint8}")
    return Mxfp4Tensor(blocks.file, blocks.dtype, shape, blocks.start, blocks, scales)


def _decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode bytes [.., G, 16] with scales [.., G] to values [.., G, 32]."""
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    values = torch.tensor(_VALUE_OF_CODE, dtype=dtype)[codes.int()]
    return torch.ldexp(values, scales.int().sub(_SCALE_BIAS).unsqueeze(-1)).to(dtype)
