"""Multiply rows by quantised matrices (`ops/quantised.py`), like the main loop of `product.py`.

A tile [O, I] of a matrix is loaded as bytes and dequantised in registers. Forward transposes the
tile and sums along I, and backward sums along O over the same bytes. The product of a value and its
scale is computed in fp32 and rounded once, to the dtype of the rows.

    nf4    A byte has two codes, the first code in the upper half. For each scale the kernel
           computes the 16 values that a code can have. A code then selects one of these values,
           which is a shuffle between threads and needs no memory access.
    fp8    sm_90 has an instruction that converts fp8. On other GPUs the kernel moves the bits to
           their positions in an fp32 number.

A step along the sum is never longer than a block along I. In forward each row of a tile therefore
has one scale. In backward each row has one scale per block of columns. The sizes of a matrix are
multiples of a block, so no step needs a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from hf_moe_ep.ops.kernels.blocks import converts_fp8
from hf_moe_ep.ops.quantised import NF4_CODES

_CODES = tl.constexpr(NF4_CODES)
# Bit 31 and bits 0 to 26.
_SIGN_AND_LOW_EXPONENT = tl.constexpr(-0x78000001)
_TWO_TO_120 = tl.constexpr(2.0**120)


@dataclass(frozen=True)
class ByteMatrices:
    """Quantised matrices [L, O, I], which launchers accept instead of a tensor.

    Attributes:
        values: contiguous bytes in a format of `ops/quantised.py`.
        scale: contiguous fp32 scales. Nested scales are already dequantised.
        kind: "nf4" or "fp8".
        transposed: True if the object stands for the transposed matrices [L, I, O].
    """

    values: Tensor
    scale: Tensor
    kind: str
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return [L, O, I], or [L, I, O] if transposed."""
        experts, rows, in_bytes = self.values.shape
        columns = in_bytes * (2 if self.kind == "nf4" else 1)
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)

    def transpose(self, first: int, second: int) -> ByteMatrices:
        """Transpose the last two dimensions, like Tensor.transpose."""
        assert {first, second} == {1, 2}
        return replace(self, transposed=not self.transposed)


Matrices = Tensor | ByteMatrices


def list_matrix_arguments(matrix: Matrices) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Return a kernel's arguments: values, scales and strides. Quantised bytes have strides 0."""
    if isinstance(matrix, ByteMatrices):
        return matrix.values, matrix.scale, 0, 0, 0
    stride_l, stride_k, stride_n = matrix.stride()
    return matrix, None, stride_l, stride_k, stride_n


def list_matrix_constants(matrix: Matrices) -> tuple[str, bool]:
    """Return a kernel's constants: KIND, the format, and NATIVE, True if the GPU converts fp8."""
    if not isinstance(matrix, ByteMatrices):
        return "", False
    return matrix.kind, matrix.kind == "fp8" and converts_fp8(matrix.values.device)


@triton.jit
def multiply_quantised(
    rows, row_of_position, row_stride, values, scale,
    expert, position, inner, o_n, column, limit_n,
    KIND: tl.constexpr, NATIVE: tl.constexpr, BACK: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [M, N]: rows at `position` [M] times the transposed rows `o_n` [N] of the matrix.

    With BACK the second factor consists of the columns `o_n` of the matrix, which are the block
    number `column`.
    """
    tl.static_assert(EVEN_K)
    BLOCK_N: tl.constexpr = o_n.shape[0]
    kind = rows.dtype.element_ty
    num_o = inner if BACK else limit_n
    num_i = limit_n if BACK else inner
    o_row = position if row_of_position is None else tl.load(row_of_position + position)  # [M]
    o_k = tl.arange(0, BLOCK_K)
    p_x = rows + o_row.to(tl.int64)[:, None] * row_stride + o_k[None, :]  # [M, K]
    sums = tl.zeros([position.shape[0], BLOCK_N], tl.float32)
    # `multiply_tile` in `product.py` explains this hint.
    tl.assume(inner > 0)
    for step in range(0, inner, BLOCK_K):
        b_x = tl.load(p_x)  # [M, K]
        if BACK:
            b_w = dequantise_tile(
                values, scale, expert, step + o_k, column * BLOCK_N, num_o, num_i,
                KIND, NATIVE, BLOCK_N, EVEN_N, kind,
            )  # [K, N]  # fmt: skip
        else:
            b_w = tl.trans(dequantise_tile(
                values, scale, expert, o_n, step, num_o, num_i,
                KIND, NATIVE, BLOCK_K, EVEN_N, kind,
            ))  # [K, N]  # fmt: skip
        sums = tl.dot(b_x, b_w, sums, input_precision=PRECISION)
        p_x += BLOCK_K
    return sums


@triton.jit
def dequantise_tile(
    values, scale, expert, o_o, first, num_o, num_i,
    KIND: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Return [O, TILE] in the dtype OUT: rows `o_o` of an expert's matrix [num_o, num_i].

    The columns start at `first`. Unless WHOLE, a part of the tile may lie outside the matrix. This
    part is filled with zeros.
    """
    PER_BYTE: tl.constexpr = 2 if KIND == "nf4" else 1
    BLOCK_O: tl.constexpr = 1 if KIND == "nf4" else 128
    BLOCK_I: tl.constexpr = 64 if KIND == "nf4" else 128
    # The number of scales in a row of the tile, and the number of columns that share a scale.
    SCALES: tl.constexpr = (TILE + BLOCK_I - 1) // BLOCK_I
    SPAN: tl.constexpr = TILE // SCALES
    tl.static_assert(SPAN <= BLOCK_I)  # both are powers of 2
    ROWS: tl.constexpr = o_o.shape[0]
    # A row of the matrix consists of whole blocks.
    in_bytes = tl.multiple_of(num_i // PER_BYTE, 32)
    in_scales = num_i // BLOCK_I
    values += expert.to(tl.int64) * num_o * in_bytes
    scale += expert.to(tl.int64) * (num_o // BLOCK_O) * in_scales
    o_byte = first // PER_BYTE + tl.arange(0, TILE // PER_BYTE)
    o_scale = first // BLOCK_I + tl.arange(0, SCALES)
    p_byte = values + o_o[:, None] * in_bytes + o_byte[None, :]  # [O, bytes of TILE]
    p_scale = scale + (o_o // BLOCK_O)[:, None] * in_scales + o_scale[None, :]  # [O, SCALES]
    if WHOLE:
        b_byte = tl.load(p_byte)  # [O, bytes of TILE]
        b_scale = tl.load(p_scale)  # [O, SCALES]
    else:
        m_o = (o_o < num_o)[:, None]
        b_byte = tl.load(p_byte, mask=m_o & (o_byte < in_bytes)[None, :], other=0)
        b_scale = tl.load(p_scale, mask=m_o & (o_scale < in_scales)[None, :], other=0.0)
    if KIND == "nf4":
        code = tl.reshape(b_byte, (ROWS, SCALES, SPAN // 2)).to(tl.int32)
        b_16 = (_make_nf4_codes()[None, None, :] * b_scale[:, :, None]).to(OUT)  # [O, SCALES, 16]
        tile = tl.join(tl.gather(b_16, code >> 4, 2), tl.gather(b_16, code & 15, 2))
    else:
        tl.static_assert(KIND == "fp8")
        b_value = tl.reshape(e4m3(b_byte, NATIVE), (ROWS, SCALES, SPAN))
        tile = (b_value * b_scale[:, :, None]).to(OUT)
    return tl.reshape(tile, (ROWS, TILE))


@triton.jit
def _make_nf4_codes():
    """Return the values [16] of the codes."""
    o_code = tl.arange(0, 16)
    codes = tl.zeros([16], tl.float32)
    for code in tl.static_range(16):
        codes = tl.where(o_code == code, _CODES[code], codes)
    return codes


@triton.jit
def e4m3(byte, NATIVE: tl.constexpr):
    """Convert bytes of float8_e4m3fn to fp32."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The sign, exponent and mantissa are moved to their positions in fp32. The exponent is then
        # too small by the difference of the biases, 127 - 7, also in subnormal values.
        code = byte.to(tl.int32)
        bits = ((code << 24) >> 4) & _SIGN_AND_LOW_EXPONENT
        value = bits.to(tl.float32, bitcast=True) * _TWO_TO_120
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value
