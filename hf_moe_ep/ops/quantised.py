"""Quantise and dequantise expert matrices in the formats nf4 and fp8.

A matrix is [O, I] (output and input size), even if its module stores the transpose. Neighbouring
values along I share a scale:

    format        tensor        shape             contents
    nf4           values        [O, I / 2]        two 4-bit codes per byte, as in bitsandbytes
                  block_scale   [O, I / 64]       fp32, one scale per 64 neighbours
    nf4, nested   values        [O, I / 2]
                  block_scale   [O, I / 64]       bytes: bitsandbytes' 8-bit codes
                  nested_scale  [blocks, 2]       fp32 scale and offset for each block of 256 bytes
                                                  of block_scale, counted row by row. The last block
                                                  may be shorter
    fp8           values        [O, I]            the bytes of float8_e4m3fn
                  block_scale   [O / 128, I / 128]  fp32, one scale per 128 x 128 values, where
                                                  value = fp8 * scale. Published checkpoints call
                                                  this tensor weight_scale_inv

A [6, 128] matrix in nf4 has 6 x 64 bytes and 6 x 2 scales. A value takes 0.5625 bytes in nf4, 0.516
in nested nf4 and 1.0002 in fp8. A stack holds the matrices of all experts, which are quantised
separately: [E, O, I / 2] and so on. `values` has the dtype uint8 in all formats, so neither gloo
nor FSDP2 has to support an 8-bit float dtype.

bitsandbytes quantises and dequantises nf4, and is imported at its first use. This module itself
dequantises the scales of nested nf4. All codes and values equal the results of bitsandbytes. The
product of a stored value and its scale is computed in fp32 and rounded once. Quantised matrices are
frozen, so no function of this module has a gradient. Both paths dequantise in forward and again in
backward. The torch path calls `dequantise` for each product (`ExpertWeights.matrix` in
`interface.py`). The Triton kernels dequantise tiles of a matrix while they multiply
(`kernels/dequantise.py`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# The values of the 16 nf4 codes (arXiv 2305.14314, appendix E), with the digits of fp32.
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
# Suffixes of parameter names: gate_up_proj_block_scale, gate_up_proj_nested_scale.
BLOCK_SCALE, NESTED_SCALE = "_block_scale", "_nested_scale"

# Size of the blocks (rows, columns) whose values share a scale.
_BLOCKS = {"nf4": (1, 64), "fp8": (128, 128)}
_VALUES_PER_BYTE = {"nf4": 2, "fp8": 1}
# Number of bytes of block_scale that share a nested scale.
_NESTED_BLOCK = 256
# Number of values that are quantised at a time. This takes about 20 bytes of memory per value.
_VALUES_AT_A_TIME = 1 << 17
_FP8 = torch.float8_e4m3fn
# The dtypes that bitsandbytes quantises from and dequantises to.
_BITSANDBYTES_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantisation:
    """The format in which expert matrices are stored.

    Attributes:
        kind: "nf4" or "fp8".
        nested: True if the scales of nf4 are quantised as well.
    """

    kind: str
    nested: bool = False

    @property
    def values_per_byte(self) -> int:
        """Return how many values of a matrix one byte of `values` holds."""
        return _VALUES_PER_BYTE[self.kind]

    def num_values(self, stored: Tensor) -> int:
        """Count the values of the matrix, or of the stack, whose bytes are `stored`."""
        return stored.numel() * self.values_per_byte


@dataclass(frozen=True)
class Quantised:
    """The bytes and scales of a matrix or of a stack (see the module docstring)."""

    values: Tensor
    block_scale: Tensor
    nested_scale: Tensor | None = None

    def matrix_of(self, expert: int) -> Quantised:
        """Return one matrix of a stack, as views."""
        nested = None if self.nested_scale is None else self.nested_scale[expert]
        return Quantised(self.values[expert], self.block_scale[expert], nested)

    def copy_into(self, target: Quantised) -> None:
        """Copy all tensors into the tensors of `target`, which have the same shapes."""
        pairs = zip(target.by_name("").values(), self.by_name("").values(), strict=True)
        for target_tensor, tensor in pairs:
            target_tensor.copy_(tensor)

    def by_name(self, name: str) -> dict[str, Tensor]:
        """Return the tensors by parameter name. The values come first and are called `name`."""
        named = {name: self.values, name + BLOCK_SCALE: self.block_scale}
        if self.nested_scale is not None:
            named[name + NESTED_SCALE] = self.nested_scale
        return named


def check_available(quantisation: Quantisation) -> None:
    """Raise ImportError if a format needs a library that is not installed."""
    if quantisation.kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            'experts_dtype="nf4" needs bitsandbytes, which is not installed: '
            'pip install "bitsandbytes>=0.49"; experts_dtype="fp8" needs only torch'
        )


def check_sizes(name: str, shape_OI: tuple[int, int], quantisation: Quantisation) -> None:
    """Raise ValueError if the matrix of the parameter `name` does not consist of whole blocks."""
    kind = quantisation.kind
    dims = ("out", "in")
    for dim, size, block in zip(dims, shape_OI, _BLOCKS[kind], strict=True):
        if size % block:
            other_kind = "fp8" if kind == "nf4" else "nf4"
            fits = not any(n % b for n, b in zip(shape_OI, _BLOCKS[other_kind], strict=True))
            remedy = f'use experts_dtype="{other_kind}", or ' if fits else ""
            raise ValueError(
                f"{kind} has blocks of {block} along the {dim} dimension of an expert's matrix, "
                f"but {name} [out {shape_OI[0]}, in {shape_OI[1]}] has {size}, which is not a "
                f"multiple of {block}; {remedy}leave the experts in bf16 (experts_dtype=None)"
            )


def allocate_stack(
    shape_EOI: tuple[int, int, int], quantisation: Quantisation, device: torch.device | str
) -> Quantised:
    """Allocate the tensors of a stack. On the meta device the tensors take no memory."""
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
    """Quantise one expert matrix at a time. On the meta device only the shapes are computed."""
    experts, rows, columns = weight_EOI.shape
    stack = allocate_stack((experts, rows, columns), quantisation, weight_EOI.device)
    if weight_EOI.is_meta:
        return stack
    for expert, weight_OI in enumerate(weight_EOI):
        quantise(weight_OI, quantisation).copy_into(stack.matrix_of(expert))
    return stack


@torch.no_grad()
def quantise(weight_OI: Tensor, quantisation: Quantisation) -> Quantised:
    """Quantise the matrix of one expert, or some rows of the matrix if the scales are not nested.

    A few rows are quantised at a time, independently of the other rows. The scales of nested nf4
    are quantised at the end, because they depend on all rows of the matrix.
    """
    kind, (rows, columns) = quantisation.kind, weight_OI.shape
    plain = Quantisation(kind)
    matrix = allocate_stack((1, rows, columns), plain, weight_OI.device).matrix_of(0)
    block_rows = _BLOCKS[kind][0]
    step = max(1, _VALUES_AT_A_TIME // max(1, columns * block_rows)) * block_rows
    quantise_rows = _quantise_fp8 if kind == "fp8" else _quantise_nf4
    for start in range(0, rows, step):
        part = quantise_rows(weight_OI[start : start + step].contiguous())
        matrix.values[start : start + step].copy_(part.values)
        scale_rows = slice(start // block_rows, -(-(start + step) // block_rows))
        matrix.block_scale[scale_rows].copy_(part.block_scale)
    return _quantise_scales(matrix) if quantisation.nested else matrix


@torch.no_grad()
def dequantise(matrix: Quantised, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise the matrix of one expert to [O, I] in `dtype`."""
    return _dequantise_fp8(matrix, dtype) if kind == "fp8" else _dequantise_nf4(matrix, dtype)


@torch.no_grad()
def dequantise_scales(stack: Quantised) -> Tensor:
    """Return the block scales of a stack as a contiguous fp32 tensor, without bitsandbytes."""
    if stack.nested_scale is None:
        return stack.block_scale.contiguous()
    experts, *shape = stack.block_scale.shape
    codes = _make_nested_codes(stack.block_scale.device)
    blocks = stack.nested_scale.shape[1]
    padded = codes.new_zeros(experts, blocks * _NESTED_BLOCK)
    scales = stack.block_scale.flatten(1)
    padded[:, : scales.shape[1]] = codes[scales.int()]
    scale, offset = stack.nested_scale.unsqueeze(2).unbind(3)
    values = (padded.view(experts, blocks, _NESTED_BLOCK) * scale).flatten(1)
    # All blocks of a matrix have the same offset.
    return (values[:, : scales.shape[1]] + offset[:, 0]).view(experts, *shape)


def get_block_shape(quantisation: Quantisation) -> tuple[int, int]:
    """Return the size of the blocks (rows, columns) whose values share a scale."""
    return _BLOCKS[quantisation.kind]


def can_cut_rows(shape_OI: tuple[int, int], quantisation: Quantisation, parts: int) -> bool:
    """Return True if splitting the rows of a matrix into `parts` equal parts splits no block.

    Each part then has its own scales, and every tensor is split evenly along its first dimension.
    """
    rows, columns = shape_OI
    block_rows, block_columns = _BLOCKS[quantisation.kind]
    if rows % parts or (rows // parts) % block_rows:
        return False
    scales_per_part = rows // parts // block_rows * (columns // block_columns)
    return not quantisation.nested or scales_per_part % _NESTED_BLOCK == 0


def _quantise_nf4(weight_OI: Tensor) -> Quantised:
    rows, columns = weight_OI.shape
    if weight_OI.dtype not in _BITSANDBYTES_DTYPES:
        weight_OI = weight_OI.float()
    packed, state = _import_bitsandbytes().quantize_4bit(weight_OI, blocksize=64, quant_type="nf4")
    return Quantised(packed.view(rows, columns // 2), state.absmax.view(rows, columns // 64))


def _quantise_scales(matrix: Quantised) -> Quantised:
    """Quantise the scales of a matrix, as `quantize_4bit` does with compress_statistics=True."""
    offset = matrix.block_scale.flatten().mean()
    codes, state = _import_bitsandbytes().quantize_blockwise(
        matrix.block_scale.flatten() - offset, blocksize=_NESTED_BLOCK
    )
    nested_scale = torch.stack([state.absmax, offset.expand_as(state.absmax)], 1)
    return Quantised(matrix.values, codes.view(matrix.block_scale.shape), nested_scale)


def _dequantise_nf4(matrix: Quantised, dtype: torch.dtype) -> Tensor:
    rows, columns = matrix.values.shape[0], 2 * matrix.values.shape[1]
    nested = matrix.nested_scale if matrix.nested_scale is None else matrix.nested_scale[None]
    block_scale = dequantise_scales(
        Quantised(matrix.values[None], matrix.block_scale[None], nested)
    )
    supported = dtype if dtype in _BITSANDBYTES_DTYPES else torch.float32
    _import_bitsandbytes()  # The import registers the operator.
    weight_OI: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        matrix.values.view(-1, 1), block_scale.flatten(), 64, "nf4", [rows, columns], supported
    )
    return weight_OI.to(dtype)


def _quantise_fp8(weight_OI: Tensor) -> Quantised:
    values, block_scale = _encode_rows(weight_OI)
    return Quantised(values.view(torch.uint8), block_scale)


def encode_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode a weight [.., O, I] in fp8. Returns E4M3 values of this shape, and a scale per block.

    Blocks at an edge may be smaller. A scale is the largest magnitude in a block divided by 448,
    the largest value of E4M3. The scale of a block of zeros is 1. Values are multiplied by the
    inverse scale, as in transformers' Fp8Quantize (integrations/finegrained_fp8.py). A few rows of
    blocks are encoded at a time.
    """
    *outer, rows, columns = weight.shape
    height, width = _BLOCKS["fp8"]
    shape_of_scales = -(-rows // height), -(-columns // width)
    values = torch.empty(weight.shape, dtype=_FP8, device=weight.device)
    scales = torch.empty(*outer, *shape_of_scales, dtype=torch.float32, device=weight.device)
    if weight.is_meta:
        return values, scales
    step = max(1, _VALUES_AT_A_TIME // max(1, columns * height))  # rows of blocks
    matrices = (values.view(-1, rows, columns), scales.view(-1, *shape_of_scales))
    for matrix_OI, values_OI, block_scales in zip(
        weight.reshape(-1, rows, columns), *matrices, strict=True
    ):
        for start in range(0, shape_of_scales[0], step):
            part = slice(start * height, (start + step) * height)
            values_OI[part], block_scales[start : start + step] = _encode_rows(matrix_OI[part])
    return values, scales


def _encode_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows of a matrix, from the first row of a block on. Returns E4M3 values and scales."""
    rows, columns = weight_OI.shape
    height, width = _BLOCKS["fp8"]
    limit, missing = torch.finfo(_FP8).max, (-rows % height, -columns % width)
    padded = weight_OI.to(torch.float32)
    if any(missing):
        padded = pad(padded, (0, missing[1], 0, missing[0]))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    largest = blocks.abs().amax((1, 3))
    inverse = torch.where(largest > 0, limit / largest, 1.0)
    scaled = (blocks * inverse[:, None, :, None]).clamp(-limit, limit)
    return scaled.view(padded.shape)[:rows, :columns].to(_FP8), 1.0 / inverse


def _dequantise_fp8(matrix: Quantised, dtype: torch.dtype) -> Tensor:
    rows, columns = matrix.values.shape
    blocks = matrix.values.view(_FP8).float().view(rows // 128, 128, columns // 128, 128)
    blocks *= matrix.block_scale[:, None, :, None]
    return blocks.view(rows, columns).to(dtype)


def _import_bitsandbytes() -> Any:
    # bitsandbytes is imported on demand, because it is optional and its import looks for GPUs.
    import bitsandbytes.functional

    return bitsandbytes.functional


@cache
def _make_nested_codes(device: torch.device) -> Tensor:
    """Return the values of the 256 codes of nested scales, in ascending order.

    Two values are 0 and 1. All other values occur with both signs (arXiv 1511.04561, "dynamic
    tree"). For n = 0 .. 6 the interval from 0.1 to 1 is divided into 2^n equal parts, and the
    centre of each part is multiplied by 10^(n - 6):

        n = 0: 0.55 * 1e-6        n = 1: 0.325 * 1e-5, 0.775 * 1e-5        n = 2: four values * 1e-4

    These values are not read from bitsandbytes, because up to version 0.49 its CPU code overwrites
    the first value of its own table with -1.
    """
    # The cached result must not depend on the current default dtype and device.
    on_host: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    codes = [torch.tensor([0.0, 1.0], **on_host)]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1, **on_host)
        centres = (edges[:-1] + edges[1:]) / 2 * 10 ** (bits - 6)
        codes += [centres, -centres]
    return torch.cat(codes).sort().values.to(device)
