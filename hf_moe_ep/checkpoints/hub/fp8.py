"""Decode FP8 weights of the hub (Qwen3, DeepSeek-V3) while a rank reads its own shard.

A checkpoint stores a weight [.., out, in] as two tensors: the values in E4M3, one byte each, and
one scale per block of 128 x 128 values. Blocks at an edge are smaller. For example:

    key                           shape        example
    3.gate_proj.weight            [192, 300]   row 130, column 5 has the byte 0x38, which means 1.0
    3.gate_proj.weight_scale_inv  [2, 3]       row 1, column 0, the scale of this block, is 0.25, so
                                               the weight is 1.0 * 0.25

Experts and Linear layers are stored alike, and weights without scales are stored in bf16. The size
of a block is in config.json. `join_scales` and `join_stacked_scales` replace the two tensors by a
`Fp8Tensor`, which multiplies values and scales in fp32 and rounds the product once, to the dtype in
which the model was built, as transformers does with FineGrainedFP8Config(dequantize=True).

A rank's shard may begin in the middle of a block, because blocks begin at multiples of 128 in the
checkpoint's tensor and not in the parameter. A box (index ranges) may be read from a view of the
tensor that has other dims than the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.configs import CONFIG
from hf_moe_ep.checkpoints.hub.layout import Layout, list_names
from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader
from hf_moe_ep.ranks.boxes import Box, make_whole_box, number_elements

_FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
# In published checkpoints a block has this number of rows and this number of columns.
BLOCK = 128
_ACTIVATION_SCALE = "activation_scale"
_EXPONENT_BIAS = 127  # of E8M0, the format of scales that are stored as bytes
# A weight that stacks all experts has this number of dims.
_STACKED = 3
# This number of values is decoded at a time. Each value takes about 8 bytes of temporary memory.
_VALUES_PER_STEP = 1 << 18


@dataclass(frozen=True, slots=True)
class Fp8Tensor(FileTensor):
    """A tensor of a file with one scale per block of its last two dims.

    Attributes:
        scales: the tensor of the scales.
        block: the number of rows and the number of columns of a block.
    """

    scales: FileTensor
    block: tuple[int, int]

    def read_into(
        self, out: Tensor, box: Box, *, view: tuple[int, ...], dtype: torch.dtype, reader: Reader
    ) -> None:
        """Decode a box of the tensor, viewed in the shape `view`, some rows at a time."""
        scales = convert_scales(reader.read(self.scales, make_whole_box(self.scales.shape)))
        scales, split = scales.flatten(0, -2), self._split_at_rows(view)
        (first, end), *others = box
        step = max(1, _VALUES_PER_STEP // max(1, math.prod(out.shape[1:])))
        for start in range(first, end, step):
            part = ((start, min(start + step, end)), *others)
            scale_rows, scale_columns = self._find_blocks(part, view, split)
            values = reader.read(self, part, view).to(torch.float32)
            matrix = values.view(len(scale_rows), len(scale_columns))
            matrix.mul_(scales[scale_rows][:, scale_columns])  # `matrix` is a view of `values`
            out[start - first : part[0][1] - first] = values.to(dtype)

    def _split_at_rows(self, view: tuple[int, ...]) -> int:
        """Return the number of leading dims of a view that make up the rows, not the columns."""
        ends = [dim for dim in range(len(view) + 1) if math.prod(view[dim:]) == self.shape[-1]]
        if not ends:
            raise ValueError(
                f"cannot decode {self.shape} in the view {view}, where rows do not begin at a dim"
            )
        return ends[0]

    def _find_blocks(self, box: Box, view: tuple[int, ...], split: int) -> tuple[Tensor, Tensor]:
        """Return the row of `scales` of each row of a box, and the column of each column."""
        zero = torch.zeros((), dtype=torch.int64)
        rows = number_elements(zero, box[:split], view[:split]).flatten()
        columns = number_elements(zero, box[split:], view[split:]).flatten()
        num_rows, num_scale_rows = self.shape[-2], self.scales.shape[-2]
        scale_rows = rows // num_rows * num_scale_rows + rows % num_rows // self.block[0]
        return scale_rows, columns // self.block[1]


def convert_scales(scales: Tensor) -> Tensor:
    """Return scales as fp32 factors. Scales that are stored as bytes are powers of two in E8M0."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(()), scales.int() - _EXPONENT_BIAS)
    return scales.to(torch.float32)


def join_scales(tensors: Mapping[str, FileTensor], folder: Path) -> dict[str, FileTensor]:
    """Replace each FP8 weight of a checkpoint and its scales by one `Fp8Tensor`.

    Scales of activations are left out, because only FP8 kernels need them.

    Raises:
        ValueError: scales do not have the shape that the weight needs, or config.json lacks the
            size of a block.
    """
    weights = find_unjoined_weights(tensors)
    block = _read_block(folder, next(iter(weights))) if weights else (1, 1)
    joined = {
        key: _join_weight(key, tensors[key], key + SCALE, tensors[key + SCALE], block)
        for key in weights
        if key + SCALE in tensors
    }
    removed = {part for key in joined for part in list_fp8_keys(key)[1:]}
    return {key: joined.get(key, tensor) for key, tensor in tensors.items() if key not in removed}


def list_fp8_keys(key: str) -> list[str]:
    """List the key of an FP8 weight and all keys that its scales can have."""
    return [
        key,
        key + SCALE,
        f"{key.removesuffix('weight')}{_ACTIVATION_SCALE}",
        f"{key}_{_ACTIVATION_SCALE}",
    ]


def join_stacked_scales(
    tensors: Mapping[str, FileTensor], layout: Layout, folder: Path
) -> Mapping[str, FileTensor]:
    """Join FP8 weights of single experts with scales that are stacked over all experts.

    transformers uses this form when it saves a model that it has quantised itself:
    `experts.3.gate_proj.weight` and `experts.gate_up_proj_scale_inv` [E, 2F / 128, H / 128].

    Raises:
        ValueError: as in `join_scales`, or scales are missing.
    """
    weights = find_unjoined_weights(tensors)
    if not weights:
        return tensors
    block, joined = _read_block(folder, next(iter(weights))), dict(tensors)
    for name, pieces in layout.items():
        stack = tensors.get(name + SCALE)
        fp8_pieces = [p for p in pieces if p.key in weights and len(p.start) == _STACKED]
        if stack is None or not fp8_pieces:
            continue
        for piece in fp8_pieces:
            scales = _slice_scales(piece, name + SCALE, stack, block)
            weight = tensors[piece.key]
            joined[piece.key] = _join_weight(piece.key, weight, name + SCALE, scales, block)
        del joined[name + SCALE]
    if missing := [key + SCALE for key in find_unjoined_weights(joined)]:
        weight_key = missing[0].removesuffix(SCALE)
        raise ValueError(f"{list_names('missing', missing)}, but {weight_key} is stored in {_FP8}")
    return joined


def find_unjoined_weights(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Find the FP8 weights that are not joined with their scales yet."""
    return {
        key: tensor
        for key, tensor in tensors.items()
        if tensor.dtype == _FP8 and not isinstance(tensor, Fp8Tensor)
    }


def _join_weight(
    key: str, weight: FileTensor, scales_key: str, scales: FileTensor, block: tuple[int, int]
) -> Fp8Tensor:
    *outer, rows, columns = weight.shape if len(weight.shape) > 1 else (0, *weight.shape)
    expected = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != expected:
        raise ValueError(
            f"misshapen: {scales_key} {scales.shape} does not fit {key} {weight.shape}, whose "
            f"blocks of {block[0]} x {block[1]} have scales {expected}"
        )
    return Fp8Tensor(weight.file, weight.dtype, weight.shape, weight.start, scales, block)


def _slice_scales(
    piece: Piece, scales_key: str, stack: FileTensor, block: tuple[int, int]
) -> FileTensor:
    """Return the scales of one expert's weight as a slice of the stack [E, out / 128, in / 128]."""
    expert, row, _ = piece.start
    experts, num_rows, num_columns = stack.shape if len(stack.shape) == _STACKED else (0, 0, 0)
    first, end = row // block[0], -(-(row + piece.sizes[1]) // block[0])
    if piece.sizes[0] != 1 or row % block[0] or expert >= experts or end > num_rows:
        raise ValueError(
            f"misshapen: {scales_key} {stack.shape} has no scales for {piece.key} {piece.shape}, "
            f"which starts at row {row} of expert {expert}, in blocks of {block[0]} x {block[1]}"
        )
    start = stack.start + (expert * num_rows + first) * num_columns * stack.dtype.itemsize
    return FileTensor(stack.file, stack.dtype, (end - first, num_columns), start)


def _read_block(folder: Path, weight_key: str) -> tuple[int, int]:
    """Read from config.json how many rows and columns a block has."""
    path = folder / CONFIG
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    if not isinstance(block, list) or [type(size) for size in block] != [int, int]:
        raise ValueError(
            f"{weight_key} is stored in {_FP8}, but {path} does not name the size of its blocks "
            f"(quantization_config: weight_block_size {block!r}); published FP8 checkpoints have "
            f"[128, 128]; for a model without blocks use its bf16 checkpoint"
        )
    return block[0], block[1]
