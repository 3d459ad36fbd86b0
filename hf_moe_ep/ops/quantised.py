"""Frozen matrices of experts as bytes: what is stored, and how to get there and back.

A matrix is [O, I], out and in, whatever way its module keeps it. Neighbours along I share a scale:

    nf4           values        [O, I / 2]        two codes of 4 bits each, as bitsandbytes packs
                  block_scale   [O, I / 64]       fp32, of 64 neighbours
    nf4, nested   values        [O, I / 2]
                  block_scale   [O, I / 64]       bytes: bitsandbytes' 8-bit codes
                  nested_scale  [blocks, 2]       fp32 scale and offset of 256 bytes of block_scale,
                                                  counted row by row; the last block may have fewer
    fp8           values        [O, I]            the bytes of float8_e4m3fn
                  block_scale   [O / 128, I / 128]  fp32, of 128 x 128: value = fp8 * scale, as the
                                                  weight_scale_inv of published checkpoints

[6, 128] in nf4 is 6 x 64 bytes and 6 x 2 scales. Bytes per value: 0.5625, nested 0.516, fp8 1.0002.
In a stack the experts are in front, each quantised by itself: [E, O, I / 2] and so on. Values are
bytes (uint8) in all formats, so that neither gloo nor FSDP2 has to know a dtype of 8 bits.

nf4 is bitsandbytes' own, which is imported when it is first used: equal values, code for code. What
is stored times its scale is formed in fp32 and rounded once. Here is no gradient: what is
quantised is frozen.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

KINDS = ("nf4", "fp8")
# What codes of nf4 stand for: arXiv 2305.14314, appendix E, to the digits that fp32 has.
NF4_CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Of the parameters beside `gate_up_proj`: gate_up_proj_block_scale, gate_up_proj_nested_scale.
BLOCK_SCALE, NESTED_SCALE = "_block_scale", "_nested_scale"

# Rows and columns of a matrix that share a scale.
_BLOCKS = {"nf4": (1, 64), "fp8": (128, 128)}
_VALUES_PER_BYTE = {"nf4": 2, "fp8": 1}
# Bytes of block_scale that share a nested scale.
_NESTED_BLOCK = 256
# How many values are quantised at once: each of them takes some 20 bytes meanwhile.
_VALUES = 1 << 17
_FP8 = torch.float8_e4m3fn
# What bitsandbytes quantises from, and dequantises to.
_OF_BITSANDBYTES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantisation:
    """How matrices of experts are held.

    Attributes:
        kind: of KINDS.
        nested: nf4's scales are quantised too.
    """

    kind: str
    nested: bool = False

    @property
    def values_per_byte(self) -> int:
        """How many parameters a byte of `values` stands for."""
        return _VALUES_PER_BYTE[self.kind]

    def num_values(self, stored: Tensor) -> int:
        """Count the parameters that `values` of a matrix, or of a stack, stand for."""
        return stored.numel() * self.values_per_byte


@dataclass(frozen=True)
class Quantised:
    """A matrix as bytes with its scales, or a stack of them; see the module."""

    values: Tensor
    block_scale: Tensor
    nested_scale: Tensor | None = None

    def of(self, expert: int) -> Quantised:
        """Return one matrix of a stack, the same memory."""
        nested = None if self.nested_scale is None else self.nested_scale[expert]
        return Quantised(self.values[expert], self.block_scale[expert], nested)

    def copy_into(self, place: Quantised) -> None:
        """Copy into tensors of these shapes."""
        for target, tensor in zip(_tensors(place), _tensors(self), strict=True):
            target.copy_(tensor)

    def by_name(self, name: str) -> dict[str, Tensor]:
        """Return the tensors by the names of their parameters, that of the values first."""
        named = {name: self.values, name + BLOCK_SCALE: self.block_scale}
        if self.nested_scale is not None:
            named[name + NESTED_SCALE] = self.nested_scale
        return named


def check_available(quantisation: Quantisation) -> None:
    """Raise ImportError where what a format needs is not installed."""
    if quantisation.kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            'experts_dtype="nf4" quantises by bitsandbytes, which is not installed: '
            'pip install "bitsandbytes>=0.49"; experts_dtype="fp8" needs torch alone'
        )


def check_sizes(name: str, shape_OI: tuple[int, int], quantisation: Quantisation) -> None:
    """Raise ValueError where blocks do not divide a matrix; `name` is that of its parameter."""
    kind = quantisation.kind
    words = ("out", "in")
    for word, size, block in zip(words, shape_OI, _BLOCKS[kind], strict=True):
        if size % block:
            other = "fp8" if kind == "nf4" else "nf4"
            fits = not any(n % b for n, b in zip(shape_OI, _BLOCKS[other], strict=True))
            remedy = f'use experts_dtype="{other}", or ' if fits else ""
            raise ValueError(
                f"{kind} has blocks of {block} along the {word} dimension of an expert's matrix, "
                f"and {name} [out {shape_OI[0]}, in {shape_OI[1]}] has {size}, which {block} does "
                f"not divide; {remedy}leave the experts in bf16 (experts_dtype=None)"
            )


def empty_stack(
    shape_EOI: tuple[int, int, int], quantisation: Quantisation, device: torch.device | str
) -> Quantised:
    """Allocate what a stack of matrices is stored in, on the meta device too."""
    experts, rows, columns = shape_EOI
    kind, nested = quantisation.kind, quantisation.nested
    block_rows, block_columns = _BLOCKS[kind]
    scales = (rows // block_rows, columns // block_columns)
    in_bytes = columns // _VALUES_PER_BYTE[kind]
    num_nested = -(-scales[0] * scales[1] // _NESTED_BLOCK)
    scale_dtype = torch.uint8 if nested else torch.float32
    return Quantised(
        torch.empty(experts, rows, in_bytes, dtype=torch.uint8, device=device),
        torch.empty(experts, *scales, dtype=scale_dtype, device=device),
        torch.empty(experts, num_nested, 2, device=device, dtype=torch.float32) if nested else None,
    )


def quantise_stack(weight_EOI: Tensor, quantisation: Quantisation) -> Quantised:
    """Quantise the matrices of experts one by one; of a tensor on meta the shapes alone."""
    experts, rows, columns = weight_EOI.shape
    stack = empty_stack((experts, rows, columns), quantisation, weight_EOI.device)
    if weight_EOI.is_meta:
        return stack
    for expert, weight_OI in enumerate(weight_EOI):
        quantise(weight_OI, quantisation).copy_into(stack.of(expert))
    return stack


@torch.no_grad()
def quantise(weight_OI: Tensor, quantisation: Quantisation) -> Quantised:
    """Quantise the matrix of one expert, or whole rows of it where nothing is nested.

    Some rows at a time, which know nothing of each other; scales of scales at the end.
    """
    kind, (rows, columns) = quantisation.kind, weight_OI.shape
    plain = Quantisation(kind)
    one = empty_stack((1, rows, columns), plain, weight_OI.device).of(0)
    block_rows = _BLOCKS[kind][0]
    step = max(1, _VALUES // max(1, columns * block_rows)) * block_rows
    quantise_rows = _quantise_fp8 if kind == "fp8" else _quantise_nf4
    for start in range(0, rows, step):
        part = quantise_rows(weight_OI[start : start + step].contiguous())
        at = slice(start, start + step)
        one.values[at].copy_(part.values)
        scales_at = slice(start // block_rows, -(-(start + step) // block_rows))
        one.block_scale[scales_at].copy_(part.block_scale)
    return _nested(one) if quantisation.nested else one


@torch.no_grad()
def dequantise(one: Quantised, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the matrix of one expert, [O, I] in `dtype`."""
    return _dequantise_fp8(one, dtype) if kind == "fp8" else _dequantise_nf4(one, dtype)


@torch.no_grad()
def plain_scales(stack: Quantised) -> Tensor:
    """Return the block scales of a stack in fp32, contiguous; without bitsandbytes."""
    if stack.nested_scale is None:
        return stack.block_scale.contiguous()
    experts, *shape = stack.block_scale.shape
    codes = _nested_codes(stack.block_scale.device)
    blocks = stack.nested_scale.shape[1]
    padded = codes.new_zeros(experts, blocks * _NESTED_BLOCK)
    scales = stack.block_scale.flatten(1)
    padded[:, : scales.shape[1]] = codes[scales.int()]
    scale, offset = stack.nested_scale.unsqueeze(2).unbind(3)
    values = (padded.view(experts, blocks, _NESTED_BLOCK) * scale).flatten(1)
    # One offset for all blocks of a matrix.
    return (values[:, : scales.shape[1]] + offset[:, 0]).view(experts, *shape)


def dequantised_shape(stored: Tensor, kind: str) -> tuple[int, int]:
    """Return (O, I) of the matrices of a stack, from its values."""
    return stored.shape[1], stored.shape[2] * _VALUES_PER_BYTE[kind]


def rows_may_be_cut(shape_OI: tuple[int, int], quantisation: Quantisation, parts: int) -> bool:
    """Tell whether `parts` equal shares of the rows of a matrix cut no block.

    Then each share has its own scales: all tensors are cut along their first dim, evenly.
    """
    rows, columns = shape_OI
    block_rows, block_columns = _BLOCKS[quantisation.kind]
    if rows % parts or (rows // parts) % block_rows:
        return False
    scales_of_share = rows // parts // block_rows * (columns // block_columns)
    return not quantisation.nested or scales_of_share % _NESTED_BLOCK == 0


def _tensors(quantised: Quantised) -> list[Tensor]:
    return list(quantised.by_name("").values())


def _quantise_nf4(weight_OI: Tensor) -> Quantised:
    rows, columns = weight_OI.shape
    if weight_OI.dtype not in _OF_BITSANDBYTES:
        weight_OI = weight_OI.float()
    packed, state = _functional().quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    return Quantised(packed.view(rows, columns // 2), state.absmax.view(rows, columns // 64))


def _nested(one: Quantised) -> Quantised:
    """Quantise the scales of a matrix, as `quantize_4bit` does with compress_statistics."""
    offset = one.block_scale.flatten().mean()
    codes, state = _functional().quantize_blockwise(
        one.block_scale.flatten() - offset, blocksize=_NESTED_BLOCK
    )
    nested_scale = torch.stack([state.absmax, offset.expand_as(state.absmax)], 1)
    return Quantised(one.values, codes.view(one.block_scale.shape), nested_scale)


def _dequantise_nf4(one: Quantised, dtype: torch.dtype) -> Tensor:
    rows, columns = one.values.shape[0], 2 * one.values.shape[1]
    operators = _operators()
    block_scale = one.block_scale.flatten()
    if one.nested_scale is not None:
        scale, offset = one.nested_scale.unbind(1)
        codes = _nested_codes(block_scale.device)
        block_scale = operators.dequantize_blockwise(
            block_scale, scale.contiguous(), codes, _NESTED_BLOCK, torch.float32
        )
        # One offset for all blocks of a matrix.
        block_scale = block_scale + offset[0]
    known = dtype if dtype in _OF_BITSANDBYTES else torch.float32
    weight_OI: Tensor = operators.dequantize_4bit(
        one.values.view(-1, 1), block_scale, 64, "nf4", [rows, columns], known
    )
    return weight_OI.to(dtype)


def _quantise_fp8(weight_OI: Tensor) -> Quantised:
    rows, columns = weight_OI.shape
    squares = weight_OI.float().view(rows // 128, 128, columns // 128, 128)
    largest = squares.abs().amax((1, 3))
    limit = torch.finfo(_FP8).max
    # As transformers' quantiser rounds; a block of zeros has scale 1.
    factor = torch.where(largest > 0, limit / largest, torch.ones_like(largest))
    scaled = (squares * factor[:, None, :, None]).clamp(-limit, limit)
    return Quantised(scaled.to(_FP8).view(rows, columns).view(torch.uint8), 1 / factor)


def _dequantise_fp8(one: Quantised, dtype: torch.dtype) -> Tensor:
    rows, columns = one.values.shape
    squares = one.values.view(_FP8).float().view(rows // 128, 128, columns // 128, 128)
    squares *= one.block_scale[:, None, :, None]
    return squares.view(rows, columns).to(dtype)


def _functional() -> Any:
    # Imported by those who use it: it is optional, and looks for GPUs.
    import bitsandbytes.functional

    return bitsandbytes.functional


def _operators() -> Any:
    _functional()
    return torch.ops.bitsandbytes


@cache
def _nested_codes(device: torch.device) -> Tensor:
    """Return the 256 numbers that bytes of nested scales stand for, least first.

    0 and 1, and for each power of ten from 1e-6 to 1 the middles of 1, 2, 4 .. 64 parts of 0.1 to
    1 times it, of either sign (arXiv 1511.04561, "dynamic tree"). bitsandbytes' own table is no
    source: up to 0.49 its CPU code sets the first number to -1, for the process alone.
    """
    found = [torch.tensor([0.0, 1.0], device="cpu")]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2 * 10 ** (bits - 6)
        found += [middles, -middles]
    return torch.cat(found).sort().values.to(device)
