"""Choose the block sizes of the Triton kernels from a table, without tuning at run time.

If every rank tuned by itself, ranks would choose different sizes and wait for each other in
collectives, and the first step would take minutes, which looks like a hang. `choose_blocks` selects
a row of the table by the GPU's generation, the bytes of the dtype and the mean number of rows per
expert. `benchmarks/compile_kernels.py` compiles the kernels for all rows of the table ahead of time
and checks their registers, shared memory and loops.

    m                     rows of a tile (up to m consecutive pairs of one expert), the same in all
                          kernels of a call
    Block(n, k, ...)      columns, step along the sum, warps, pipeline stages. `registers` limits
                          the registers of a thread, so that two programs fit on a multiprocessor.
                          `tma` loads blocks of aligned tensors through TMA descriptors
    up, down              the two products of the experts. The n of `up` counts columns of act
    dgated                the backward through down and gate
    rows, outer           the gradients of the rows and of the matrices. `outer` exchanges m and n
                          if the right factor is gathered, so that the gathered side is shorter
    thin, thin_outer      products in which one size is an adapter's rank. The rank limits n
    rank                  the longest step along an adapter's rank in the other kernels
    up_adapted            replaces `up` for experts with an adapter, if `up` would spill registers
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Block:
    n: int
    k: int
    warps: int
    stages: int
    registers: int | None = None
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class OuterBlock(Block):
    m: int


def choose_compiler_options(block: Block) -> dict[str, int | None]:
    """Return the compiler options of a launch."""
    return {
        "num_warps": block.warps,
        "num_stages": block.stages,
        "maxnreg": block.registers,
    }


@dataclass(frozen=True)
class Blocks:
    """One row of the table."""

    m: int
    up: Block
    down: Block
    rows: Block
    dgated: Block
    outer: OuterBlock
    thin: Block
    thin_outer: OuterBlock
    rank: int = 32
    up_adapted: Block | None = None

    def __post_init__(self) -> None:
        if self.thin.tma or self.thin_outer.tma:
            raise ValueError("thin products do not support tma=True; leave it out of their blocks")


# The number of terms in the shortest sum that tensor cores compute.
_LEAST_RANK = 16
# If experts have fewer rows than this on average, tiles of 128 rows are mostly padding.
FEW_ROWS = 128
# If experts have fewer rows than this, the sums of `outer` are so short that programs with wide
# blocks spend most of their time after their loops. On sm_90 such calls take `outer` from the row
# for few rows, and all other blocks from the row for many rows.
MANY_ROWS = 512

# Shared memory that a program may use with each generation's blocks, in descending order.
SHARED_BYTES = {"sm_90": 232_448, "sm_80": 101_376}

TABLE: dict[tuple[str, int, str], Blocks] = {
    # 16-bit dtypes on H100, H200 and all other GPUs with as much shared memory.
    ("sm_90", 2, "many"): Blocks(
        m=128,
        up=Block(n=128, k=64, warps=8, stages=4, tma=True),
        down=Block(n=256, k=64, warps=8, stages=4, tma=True),
        rows=Block(n=256, k=64, warps=8, stages=4, tma=True),
        dgated=Block(n=256, k=64, warps=16, stages=4, tma=True),
        outer=OuterBlock(m=128, n=256, k=64, warps=8, stages=5, tma=True),
        thin=Block(n=64, k=64, warps=4, stages=4),
        thin_outer=OuterBlock(m=128, n=64, k=64, warps=4, stages=6),
    ),
    ("sm_90", 2, "few"): Blocks(
        m=64,
        up=Block(n=128, k=64, warps=4, stages=4, tma=True),
        down=Block(n=128, k=64, warps=4, stages=4, tma=True),
        rows=Block(n=128, k=64, warps=4, stages=4, tma=True),
        dgated=Block(n=128, k=64, warps=8, stages=4),
        outer=OuterBlock(m=128, n=128, k=64, warps=8, stages=5, tma=True),
        thin=Block(n=64, k=64, warps=4, stages=4),
        thin_outer=OuterBlock(m=128, n=64, k=64, warps=4, stages=6),
    ),
    # A100, A6000, 4090, 5090: mma.sync and less shared memory (99 KiB on sm_86, sm_89, sm_120).
    ("sm_80", 2, "many"): Blocks(
        m=128,
        up=Block(n=64, k=32, warps=8, stages=4),
        down=Block(n=128, k=32, warps=8, stages=4),
        rows=Block(n=128, k=32, warps=8, stages=4),
        dgated=Block(n=64, k=32, warps=8, stages=4),
        outer=OuterBlock(m=128, n=128, k=32, warps=8, stages=5),
        thin=Block(n=64, k=32, warps=4, stages=4),
        thin_outer=OuterBlock(m=64, n=64, k=64, warps=4, stages=5),
    ),
    ("sm_80", 2, "few"): Blocks(
        m=64,
        up=Block(n=64, k=32, warps=4, stages=4),
        down=Block(n=128, k=32, warps=4, stages=4),
        rows=Block(n=128, k=32, warps=4, stages=4),
        dgated=Block(n=64, k=32, warps=4, stages=4),
        outer=OuterBlock(m=64, n=128, k=32, warps=4, stages=5),
        thin=Block(n=64, k=32, warps=4, stages=4),
        thin_outer=OuterBlock(m=64, n=64, k=64, warps=4, stages=5),
    ),
    # Triton's interpreter. The blocks are so small that the tests' small sizes need several blocks.
    ("interpreter", 2, "many"): Blocks(
        m=16,
        up=Block(n=16, k=32, warps=1, stages=1),
        down=Block(n=32, k=16, warps=1, stages=1),
        rows=Block(n=32, k=16, warps=1, stages=1),
        dgated=Block(n=32, k=16, warps=1, stages=1),
        outer=OuterBlock(m=32, n=16, k=16, warps=1, stages=1),
        thin=Block(n=32, k=16, warps=1, stages=1),
        thin_outer=OuterBlock(m=32, n=32, k=16, warps=1, stages=1),
        rank=16,
    ),
}
# Triton unrolls exact fp32 products, so the steps along the sum are short.
_FP32 = Blocks(
    m=64,
    up=Block(n=32, k=32, warps=4, stages=3),
    down=Block(n=64, k=32, warps=4, stages=3),
    rows=Block(n=64, k=32, warps=4, stages=3),
    dgated=Block(n=64, k=32, warps=4, stages=3),
    outer=OuterBlock(m=64, n=64, k=32, warps=4, stages=5),
    thin=Block(n=64, k=32, warps=4, stages=3),
    thin_outer=OuterBlock(m=64, n=64, k=32, warps=4, stages=5),
    rank=16,
    up_adapted=Block(n=32, k=32, warps=8, stages=3),
)
for _generation in ("sm_80", "sm_90"):
    for _bucket in ("many", "few"):
        TABLE[(_generation, 4, _bucket)] = _FP32
for _itemsize, _bucket in ((2, "few"), (4, "many"), (4, "few")):
    TABLE[("interpreter", _itemsize, _bucket)] = TABLE[("interpreter", 2, "many")]

# Rows for quantised matrices. They replace the rows of TABLE that would spill registers: exact
# products of dequantised values need more registers, so the steps are half as long. m is the same.
FOR_BYTES: dict[tuple[str, int, str], Blocks] = {
    (_generation, 4, _bucket): replace(
        _FP32,
        up=Block(n=32, k=16, warps=4, stages=3),
        down=Block(n=64, k=16, warps=4, stages=3),
        rows=Block(n=64, k=16, warps=4, stages=3),
        dgated=Block(n=64, k=16, warps=4, stages=3),
    )
    for _generation in ("sm_80", "sm_90")
    for _bucket in ("many", "few")
}
# Calls with at least FEW_ROWS and fewer than MANY_ROWS rows per expert use the rows for "many". The
# only exception, `outer` for 16-bit dtypes on sm_90, was measured on an H100 only.
for _rows in (TABLE, FOR_BYTES):
    for _generation, _itemsize, _bucket in list(_rows):
        if _bucket == "many":
            _rows[_generation, _itemsize, "some"] = _rows[_generation, _itemsize, "many"]
_few = TABLE["sm_90", 2, "few"]
TABLE["sm_90", 2, "some"] = replace(TABLE["sm_90", 2, "many"], outer=_few.outer)


def generation(device: torch.device) -> str:
    """Return the generation whose rows of the table a device uses, or "interpreter" for a CPU.

    The shared memory decides, and not the age. An RTX 50xx is newer than an H100, but has only as
    much shared memory as a 4090.
    """
    return "interpreter" if device.type != "cuda" else _find_generation(device)


@functools.cache
def _find_generation(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    available = properties.shared_memory_per_block_optin
    return next((name for name, needed in SHARED_BYTES.items() if needed <= available), "sm_80")


def converts_fp8(device: torch.device) -> bool:
    """Return True if all GPUs of the device's generation have an instruction that converts fp8."""
    return generation(device) == "sm_90"


def choose_blocks(rows: Tensor, num_experts: int, num_pairs: int, quantised: str = "") -> Blocks:
    """Return the table's row for `num_pairs` pairs of `num_experts` experts.

    `rows` is a tensor with the dtype and the device of the call. `quantised` names the format of
    the matrices. The number of rows per tile (m) does not depend on the format.
    """
    if num_pairs < FEW_ROWS * num_experts:
        bucket = "few"
    else:
        bucket = "some" if num_pairs < MANY_ROWS * num_experts else "many"
    key = generation(rows.device), rows.element_size(), bucket
    return FOR_BYTES[key] if quantised and key in FOR_BYTES else TABLE[key]


def fit_rank(rank: int, most: int) -> int:
    """Return the block size along an adapter's rank: a power of two from 16 to `most`."""
    return max(_LEAST_RANK, min(most, 1 << (rank - 1).bit_length()))


def get_dot_precision(rows: Tensor) -> str:
    """Return the precision that is set in torch for fp32 matrix products, "ieee" or "tf32"."""
    # torch.get_float32_matmul_precision() raises if `fp32_precision` was set. `fp32_precision` also
    # shows the precision that torch.set_float32_matmul_precision() has set.
    if rows.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32"
