"""List kernel blocks that may be faster than those in TABLE (`hf_moe_ep/ops/kernels/blocks.py`).

`layer_kernels.py --sweep` times these candidates on a GPU. `compile_kernels.py --check` compiles
them without a GPU. It fails if a kernel needs too much shared memory, or if one of its loops spills
registers or waits for loads that it has just started. Both run under `requiring_tma`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_moe_ep.ops.kernels import dgated, gate_up, grouped_mm, outer
from hf_moe_ep.ops.kernels.blocks import TABLE, Block, Blocks, OuterBlock


@dataclass(frozen=True)
class Candidate:
    """Another block for one field of one row of TABLE."""

    row: tuple[str, int, str]
    field: str
    block: Block

    def blocks(self) -> Blocks:
        """Return a copy of the row of TABLE that has this block instead of its own."""
        changed: dict[str, Any] = {self.field: self.block}
        return replace(TABLE[self.row], **changed)


_MANY = ("sm_90", 2, "many")
_FEW = ("sm_90", 2, "few")
_A100 = ("sm_80", 2, "many")
CANDIDATES: tuple[Candidate, ...] = (
    # These blocks have one more stage, TMA, or both.
    Candidate(_MANY, "up", Block(n=128, k=64, warps=8, stages=4)),
    Candidate(_MANY, "up", Block(n=128, k=64, warps=8, stages=3, tma=True)),
    Candidate(_MANY, "up", Block(n=128, k=64, warps=8, stages=4, tma=True)),
    Candidate(_MANY, "up", Block(n=128, k=64, warps=16, stages=4, tma=True)),
    Candidate(_MANY, "down", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_MANY, "down", Block(n=256, k=64, warps=8, stages=3, tma=True)),
    Candidate(_MANY, "down", Block(n=256, k=64, warps=8, stages=4, tma=True)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=3, tma=True)),
    Candidate(_MANY, "rows", Block(n=256, k=64, warps=8, stages=4, tma=True)),
    Candidate(_MANY, "dgated", Block(n=256, k=64, warps=16, stages=4)),
    Candidate(_MANY, "dgated", Block(n=256, k=64, warps=16, stages=3, tma=True)),
    Candidate(_MANY, "dgated", Block(n=256, k=64, warps=16, stages=4, tma=True)),
    Candidate(_MANY, "outer", OuterBlock(m=128, n=256, k=64, warps=8, stages=5, tma=True)),
    Candidate(_MANY, "outer", OuterBlock(m=256, n=128, k=64, warps=8, stages=5, tma=True)),
    Candidate(_MANY, "outer", OuterBlock(m=128, n=128, k=64, warps=8, stages=5, tma=True)),
    # These blocks are wider than the tiles for few rows.
    Candidate(_FEW, "up", Block(n=128, k=64, warps=8, stages=4)),
    Candidate(_FEW, "up", Block(n=128, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "up", Block(n=64, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "down", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_FEW, "down", Block(n=256, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "down", Block(n=128, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "rows", Block(n=256, k=64, warps=8, stages=4)),
    Candidate(_FEW, "rows", Block(n=256, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "rows", Block(n=128, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "dgated", Block(n=128, k=64, warps=4, stages=4, tma=True)),
    Candidate(_FEW, "dgated", Block(n=128, k=64, warps=8, stages=4, tma=True)),
    Candidate(_FEW, "dgated", Block(n=256, k=64, warps=8, stages=4, tma=True)),
    Candidate(_FEW, "outer", OuterBlock(m=128, n=256, k=64, warps=8, stages=5)),
    Candidate(_FEW, "outer", OuterBlock(m=128, n=128, k=64, warps=8, stages=5, tma=True)),
    Candidate(_FEW, "outer", OuterBlock(m=128, n=256, k=64, warps=8, stages=5, tma=True)),
    Candidate(_A100, "down", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_A100, "rows", Block(n=128, k=64, warps=8, stages=3)),
    Candidate(_A100, "outer", OuterBlock(m=128, n=128, k=32, warps=8, stages=6)),
)


@contextmanager
def requiring_tma() -> Iterator[None]:
    """Raise ValueError where a block with tma=True would load a tensor through pointers.

    Training falls back to pointers, because models have tensors that TMA cannot load. A benchmark
    that fell back would time, or compile, another kernel than its output says.
    """

    def make_strict(describe: Callable[..., Any]) -> Callable[..., Any]:
        def describe_or_raise(tensor: Tensor, block: Block, *args: Any, **kwargs: Any) -> Any:
            described = describe(tensor, block, *args, **kwargs)
            if block.tma and described in (None, (None, "")):
                raise ValueError(
                    f"TMA cannot load a tensor of {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()} for {block}; choose other sizes, or a block without TMA"
                )
            return described

        return describe_or_raise

    originals = [
        (module, name, vars(module)[name])
        for module in (dgated, gate_up, grouped_mm, outer)
        for name in ("describe_row_blocks", "describe_matrix_blocks")
        if name in vars(module)
    ]
    try:
        for module, name, describe in originals:
            setattr(module, name, make_strict(describe))
        yield
    finally:
        for module, name, describe in originals:
            setattr(module, name, describe)
