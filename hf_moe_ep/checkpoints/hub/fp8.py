"""FP8 weights of the hub (Qwen3, DeepSeek-V3), read as what a model trains in: a rank's own part.

A weight [.., out, in] lies in a checkpoint as two tensors. Its values are those of E4M3, a byte
each; neighbours in blocks of 128 x 128 have one scale, and at an edge a block is smaller:

    3.gate_proj.weight            [192, 300]   row 130, column 5: 0x38, so 1.0
    3.gate_proj.weight_scale_inv  [2, 3]       row 1, column 0: 0.25, so the weight is 0.25 there

Experts and Linear layers alike; what a checkpoint leaves in bf16 has no scale. How large blocks are
its config.json says. The product is formed in fp32 and rounded once, to the dtype that the model
was built in, as transformers does it with FineGrainedFP8Config(dequantize=True).

A scale belongs to a place in the file's tensor, not in the parameter: blocks are found again
wherever a rank's part begins, and in whatever shape the tensor is looked at.
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
from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader

_FP8 = torch.float8_e4m3fn
_SCALE = "_scale_inv"
_OF_ACTIVATIONS = "activation_scale"
_BIAS = 127
# Dims of a weight of all experts.
_STACKED = 3
# How many values are decoded at once: of those also factors and product are there, in fp32.
_VALUES = 1 << 18


@dataclass(frozen=True)
class Scaled(Entry):
    """A tensor of a file that has a scale for each block of its last two dims.

    Attributes:
        scales: their tensor.
        block: rows and columns of a block.
    """

    scales: Entry
    block: tuple[int, int]

    def decode(self, box: Box, view: tuple[int, ...], dtype: torch.dtype, reader: Reader) -> Tensor:
        """Decode the part `box` of the tensor seen in the shape `view`, some rows at a time."""
        values = torch.empty([stop - start for start, stop in box], dtype=dtype)
        scales = scales_as_fp32(reader.read(self.scales, tuple((0, n) for n in self.scales.shape)))
        scales, split = scales.flatten(0, -2), self._rows_end(view)
        (first, end), *others = box
        step = max(1, _VALUES // max(1, math.prod(values.shape[1:])))
        for start in range(first, end, step):
            part = ((start, min(start + step, end)), *others)
            rows, columns = self._blocks(part, view, split)
            numbers = reader.read(self, part, view).to(torch.float32)
            shape = numbers.shape
            numbers = numbers.view(len(rows), len(columns)).mul_(scales[rows][:, columns])
            values[start - first : part[0][1] - first] = numbers.view(shape)
        return values

    def _rows_end(self, view: tuple[int, ...]) -> int:
        """Return how many dims of a view lead from row to row; the others are along one row."""
        ends = [dim for dim in range(len(view) + 1) if math.prod(view[dim:]) == self.shape[-1]]
        if not ends:
            raise ValueError(f"rows of {self.shape} do not begin where dims of {view} do")
        return ends[0]

    def _blocks(self, box: Box, view: tuple[int, ...], split: int) -> tuple[Tensor, Tensor]:
        """Return for each row and each column of a part of a view the row and column of scales."""
        rows, columns = _indices(box[:split], view[:split]), _indices(box[split:], view[split:])
        height, down = self.shape[-2], self.scales.shape[-2]
        rows = rows // height * down + rows % height // self.block[0]
        return rows, columns // self.block[1]


def _indices(box: Box, view: tuple[int, ...]) -> Tensor:
    """Number what a part of a shape holds, as it lies in memory."""
    found = torch.zeros(1, dtype=torch.int64)
    for (start, stop), size in zip(box, view, strict=True):
        found = (found[:, None] * size + torch.arange(start, stop)).flatten()
    return found


def scales_as_fp32(scales: Tensor) -> Tensor:
    """Return scales as factors; bytes are powers of two, like E8M0."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(()), scales.int() - _BIAS)
    return scales.to(torch.float32)


def with_scales(entries: Mapping[str, Entry], folder: Path) -> dict[str, Entry]:
    """Join FP8 weights of the checkpoint in `folder` and their own scales to one entry each.

    Scales of activations, which a kernel for FP8 would want, are left out.

    Raises:
        ValueError: scales of another shape than the weight's; a config that does not say how large
            blocks are.
    """
    weights = _unscaled(entries)
    block = _block(folder, next(iter(weights))) if weights else (1, 1)
    joined = {
        key: _scaled(key, entries[key], key + _SCALE, entries[key + _SCALE], block)
        for key in weights
        if key + _SCALE in entries
    }
    beside = {key + _SCALE for key in joined}
    beside |= {f"{key.removesuffix('weight')}{_OF_ACTIVATIONS}" for key in joined}
    beside |= {f"{key}_{_OF_ACTIVATIONS}" for key in joined}
    return {key: joined.get(key, entry) for key, entry in entries.items() if key not in beside}


def with_stacked_scales(
    entries: Mapping[str, Entry], layout: Layout, folder: Path
) -> Mapping[str, Entry]:
    """Join FP8 weights of single experts and the scales of a parameter that they make up.

    transformers saves so what it has quantized itself: `experts.3.gate_proj.weight` beside
    `experts.gate_up_proj_scale_inv` [E, 2F / 128, H / 128].

    Raises:
        ValueError: as `with_scales`, and scales that are missing.
    """
    weights = _unscaled(entries)
    if not weights:
        return entries
    block, found = _block(folder, next(iter(weights))), dict(entries)
    for name, pieces in layout.items():
        stack = entries.get(name + _SCALE)
        of_experts = [p for p in pieces if p.key in weights and len(p.start) == _STACKED]
        if stack is None or not of_experts:
            continue
        for piece in of_experts:
            own = _of_piece(piece, name + _SCALE, stack, block)
            found[piece.key] = _scaled(piece.key, entries[piece.key], name + _SCALE, own, block)
        del found[name + _SCALE]
    if missing := [key + _SCALE for key in _unscaled(found)]:
        weight = missing[0].removesuffix(_SCALE)
        raise ValueError(f"{list_names('missing', missing)}, and {weight} is there in {_FP8}")
    return found


def _unscaled(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Find FP8 weights that have no scales yet."""
    return {
        key: entry
        for key, entry in entries.items()
        if entry.dtype == _FP8 and not isinstance(entry, Scaled)
    }


def _scaled(key: str, weight: Entry, name: str, scales: Entry, block: tuple[int, int]) -> Scaled:
    *outer, rows, columns = weight.shape if len(weight.shape) > 1 else (0, *weight.shape)
    wanted = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != wanted:
        raise ValueError(
            f"misshapen: {name} {scales.shape} does not go with {key} {weight.shape}, whose blocks "
            f"of {block[0]} x {block[1]} would have scales {wanted}"
        )
    return Scaled(weight.file, weight.dtype, weight.shape, weight.start, scales, block)


def _of_piece(piece: Piece, name: str, stack: Entry, block: tuple[int, int]) -> Entry:
    """Find the scales of a piece among those [E, out / 128, in / 128] of its parameter."""
    expert, row, _ = piece.start
    experts, down, across = stack.shape if len(stack.shape) == _STACKED else (0, 0, 0)
    first, end = row // block[0], -(-(row + piece.sizes[1]) // block[0])
    if piece.sizes[0] != 1 or row % block[0] or expert >= experts or end > down:
        raise ValueError(
            f"misshapen: {name} {stack.shape} has no scales of {piece.key} {piece.shape}, which is "
            f"expert {expert} from row {row} on, in blocks of {block[0]} x {block[1]}"
        )
    start = stack.start + (expert * down + first) * across * stack.dtype.itemsize
    return Entry(stack.file, stack.dtype, (end - first, across), start)


def _block(folder: Path, weight: str) -> tuple[int, int]:
    """Read from a folder's config how many rows and columns a block has."""
    path = folder / CONFIG
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    found = (config.get("quantization_config") or {}).get("weight_block_size")
    if not isinstance(found, list) or [type(size) for size in found] != [int, int]:
        raise ValueError(
            f"{weight} is of {_FP8}, and {path} does not say of what blocks "
            f"(quantization_config: weight_block_size {found!r}); published ones say [128, 128], "
            f"and without blocks there is the bf16 checkpoint of this model"
        )
    return found[0], found[1]
