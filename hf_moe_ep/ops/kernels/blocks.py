"""Block sizes of the Triton kernels: a plain table, no tuning at run time.

Ranks that tune on their own diverge and stall each other's collectives, and a first step that
takes minutes looks like a hang. A row of the table is chosen by the GPU's generation, the width of
the dtype and the mean number of rows per expert. `CANDIDATES` may be faster than the row they are
for; only a GPU can say. The tests compile all of them ahead of time, and look at registers, shared
memory and loops.

    m                     rows of a tile, shared by all kernels of one call
    Block(n, k, ...)      columns, step along the sum, warps, pipeline stages; the most registers
                          of a thread, where the compiler takes more than leaves room for two;
                          tma: `down` and `rows` by `block_product` where it can
    up, down              the two products of the experts; n of up is that of act
    dgated, rows, outer   back through down and gate; the gradient of rows; of matrices
    thin, thin_outer      products with a side of the rank of an adapter: n is at most that
    rank                  step along the rank in the other kernels, at most
    up_adapted            `up` with an adapter, where it needs another block to spill nothing
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    n: int
    k: int
    warps: int
    stages: int
    registers: int | None = None
    tma: bool = False


@dataclass(frozen=True)
class OuterBlock:
    m: int
    n: int
    k: int
    warps: int
    stages: int
    registers: int | None = None


def options(block: Block | OuterBlock) -> dict[str, int | None]:
    """What a launch hands to the compiler."""
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


# The shortest sum that tensor cores take.
_LEAST_RANK = 16
# Mean rows per expert below which tiles of 128 rows would be mostly padding.
FEW_ROWS = 128

# Shared memory that a program may take in the rows of a generation, most first.
SHARED_BYTES = {"sm_90": 232_448, "sm_80": 101_376}

TABLE: dict[tuple[str, int, str], Blocks] = {
    # H100, H200, and whatever else has their shared memory; 16-bit.
    ("sm_90", 2, "many"): Blocks(
        m=128,
        up=Block(n=128, k=64, warps=8, stages=3),
        down=Block(n=256, k=64, warps=8, stages=3),
        rows=Block(n=256, k=64, warps=8, stages=3),
        dgated=Block(n=128, k=64, warps=8, stages=4),
        outer=OuterBlock(m=128, n=256, k=64, warps=8, stages=5),
        thin=Block(n=64, k=64, warps=4, stages=4),
        thin_outer=OuterBlock(m=128, n=64, k=64, warps=4, stages=6),
    ),
    ("sm_90", 2, "few"): Blocks(
        m=64,
        up=Block(n=64, k=64, warps=4, stages=4),
        down=Block(n=128, k=64, warps=4, stages=4),
        rows=Block(n=128, k=64, warps=4, stages=4),
        dgated=Block(n=128, k=64, warps=8, stages=4),
        outer=OuterBlock(m=128, n=128, k=64, warps=8, stages=5),
        thin=Block(n=64, k=64, warps=4, stages=4),
        thin_outer=OuterBlock(m=128, n=64, k=64, warps=4, stages=6),
    ),
    # A100, A6000, 4090, 5090: mma.sync, less shared memory (99 KiB on sm_86, sm_89 and sm_120).
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
    # Triton's interpreter: small enough that the tests' small sizes fill several blocks.
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
# Exact products are unrolled: short steps.
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

# Rows for matrices that are held as bytes, where those of the table would spill: exact products
# over what is dequantised want more registers, so their steps are half as long. Tiles are as many.
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


@dataclass(frozen=True)
class Candidate:
    """A block that may be faster than the table's: of one field of Blocks, in one row.

    It compiles within the limits of the row's GPUs. Whether it is faster only they can say.
    """

    row: tuple[str, int, str]
    field: str
    block: Block | OuterBlock

    def blocks(self) -> Blocks:
        """The row of the table with this block in it."""
        changed: dict[str, Any] = {self.field: self.block}
        return replace(TABLE[self.row], **changed)


_MANY = ("sm_90", 2, "many")
_FEW = ("sm_90", 2, "few")
_A100 = ("sm_80", 2, "many")
CANDIDATES: tuple[Candidate, ...] = (
    # One more stage; then two programs on a multiprocessor, which overlap beginnings and ends but
    # read 1.3 times as much from the L2 cache.
    Candidate(_MANY, "up", Block(n=128, k=64, warps=8, stages=4)),
    Candidate(_MANY, "up", Block(n=64, k=64, warps=8, stages=3)),
    Candidate(_MANY, "up", Block(n=64, k=64, warps=4, stages=3)),
    Candidate(_MANY, "down", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_MANY, "down", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_MANY, "down", Block(n=128, k=64, warps=4, stages=3)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_MANY, "rows", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=3, tma=True)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=4, tma=True)),
    Candidate(_MANY, "dgated", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_MANY, "dgated", Block(n=128, k=64, warps=8, stages=3, registers=128)),
    Candidate(_MANY, "dgated", Block(n=256, k=64, warps=8, stages=3)),
    Candidate(_MANY, "dgated", Block(n=256, k=64, warps=16, stages=4)),
    Candidate(_MANY, "outer", OuterBlock(m=128, n=256, k=64, warps=8, stages=6)),
    Candidate(_MANY, "outer", OuterBlock(m=256, n=128, k=64, warps=8, stages=5)),
    Candidate(_MANY, "outer", OuterBlock(m=128, n=128, k=64, warps=8, stages=5)),
    Candidate(_FEW, "up", Block(n=128, k=64, warps=8, stages=4)),
    Candidate(_FEW, "down", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_FEW, "rows", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_FEW, "outer", OuterBlock(m=128, n=256, k=64, warps=8, stages=5)),
    Candidate(_A100, "down", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_A100, "rows", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_A100, "outer", OuterBlock(m=128, n=128, k=32, warps=8, stages=6)),
)


def generation(device: torch.device) -> str:
    """The rows of the table that a device uses; "interpreter" for a CPU.

    A kind of GPU that is not in the table is judged by what it has: the RTX 50xx are newer than an
    H100, and have the shared memory of a 4090.
    """
    if device.type != "cuda":
        return "interpreter"
    properties: Any = torch.cuda.get_device_properties(device)
    there = properties.shared_memory_per_block_optin
    return next((name for name, needed in SHARED_BYTES.items() if needed <= there), "sm_80")


def converts_fp8(device: torch.device) -> bool:
    """Whether every GPU of the device's rows has an instruction that converts from fp8."""
    return generation(device) == "sm_90"


def choose_blocks(rows: Tensor, num_experts: int, num_pairs: int, quantised: str = "") -> Blocks:
    """The row for `num_pairs` pairs over so many experts, computed in the dtype of `rows`.

    `quantised` names the format of their matrices; how many rows a tile has does not depend on it.
    """
    bucket = "few" if num_pairs < FEW_ROWS * num_experts else "many"
    key = generation(rows.device), rows.element_size(), bucket
    return FOR_BYTES[key] if quantised and key in FOR_BYTES else TABLE[key]


def rank_block(rank: int, most: int) -> int:
    """Block size along the rank of an adapter: a power of two, what is over is masked."""
    return max(_LEAST_RANK, min(most, 1 << (rank - 1).bit_length()))


def dot_precision(rows: Tensor) -> str:
    """fp32 products follow torch's own switch for fp32 matrix products, the older or the newer."""
    # torch.get_float32_matmul_precision() raises where the newer one was used; what the older one
    # was set to stands here as well.
    if rows.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32"
