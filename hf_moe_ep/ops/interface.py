"""Dataclasses that the implementations of the expert MLP hand each other.

    ExpertWeights   the stacked matrices, biases and adapters of the experts on this rank
    ExpertMatrices  their matrices one at a time, as they lie or dequantised
    LowRows         what an adapter adds to a product, as the Triton kernels take it
    Routing         which pair sits where once pairs are sorted by expert
    WeightGrads     the gradients a backward was asked for
    ExpertGrads     a place for those of the experts, to which several backwards may add

Two experts, top-2, row 1 going to expert 0 only (id 2 = "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   pairs are numbered row by row: 0 1 2 3
    pair_A   = [1, 2, 0]               by expert, in row order: expert 0 gets pairs 1, 2
    offsets  = [0, 2, 3]               expert e has positions offsets[e] .. offsets[e + 1] - 1
    slots_RK = [[2, 0], [1, 3]]        the position of each pair; 3 = A for "nowhere"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hf_moe_ep.ops.quantised import (
    BLOCK_SCALE,
    NESTED_SCALE,
    Quantised,
    dequantise,
    dequantised_shape,
)

# The tensors of ExpertWeights, in the order in which they are handed on.
WEIGHT_NAMES = (
    "up",
    "up_bias",
    "down",
    "down_bias",
    "up_a",
    "up_b",
    "down_a",
    "down_b",
    "up_block_scale",
    "up_nested_scale",
    "down_block_scale",
    "down_nested_scale",
)


@dataclass(frozen=True)
class LowRank:
    """Factors of `scale * b_LOP @ a_LPI` beside each expert's matrix; P is the rank."""

    a_LPI: Tensor
    b_LOP: Tensor
    scale: float

    def transposed(self) -> LowRank:
        """The adapter of the transposed matrix, which carries gradients back."""
        return LowRank(self.b_LOP.transpose(1, 2), self.a_LPI.transpose(1, 2), self.scale)


@dataclass(frozen=True)
class LowRows:
    """Factors of `low_AP @ b_LPO[expert]`, which a kernel adds to its product of the same rows.

    Neither where there is no adapter.
    """

    low_AP: Tensor | None = None
    b_LPO: Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.low_AP is None else self.low_AP.shape[1]

    def kernel_arguments(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Both tensors, and the strides of the second."""
        stride_l, stride_p, stride_o = (0, 0, 0) if self.b_LPO is None else self.b_LPO.stride()
        return self.low_AP, self.b_LPO, stride_l, stride_p, stride_o


NO_ADAPTER = LowRows()


class ExpertMatrices(Protocol):
    """The matrices of experts, one at a time."""

    @property
    def shape_OI(self) -> tuple[int, int]:
        """Rows and columns of each."""

    def of(self, expert: int) -> Tensor:
        """The matrix of one expert; whoever asks lets go of it before the next one."""


@dataclass(frozen=True)
class WholeMatrices:
    """Matrices that are there as they are."""

    weight_LOI: Tensor

    @property
    def shape_OI(self) -> tuple[int, int]:
        return self.weight_LOI.shape[1], self.weight_LOI.shape[2]

    def of(self, expert: int) -> Tensor:
        return self.weight_LOI[expert]


@dataclass(frozen=True)
class DequantisedMatrices:
    """Matrices that are made of their bytes when they are asked for, and not kept."""

    stack: Quantised
    kind: str
    dtype: torch.dtype

    @property
    def shape_OI(self) -> tuple[int, int]:
        return dequantised_shape(self.stack.values, self.kind)

    def of(self, expert: int) -> Tensor:
        return dequantise(self.stack.of(expert), self.kind, self.dtype)


@dataclass(frozen=True)
class ExpertWeights:
    """up_LGH, down_LHF and biases up_LG, down_LH; any strides.

    Adapters, where there are any: up_a_LPH, up_b_LGP and down_a_LPF, down_b_LHP, in the dtype of
    the matrices. `late`: see `postpone_grads`.

    Where `quantised` names a format of `quantised.py`, up and down are its bytes with their scales
    beside them, which want no gradient; adapters and biases are in the dtype of the rows.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None
    up_scale: float = 1.0
    down_scale: float = 1.0
    up_block_scale: Tensor | None = None
    up_nested_scale: Tensor | None = None
    down_block_scale: Tensor | None = None
    down_nested_scale: Tensor | None = None
    quantised: str = ""
    late: LateGrads | None = None

    @property
    def up_adapter(self) -> LowRank | None:
        if self.up_a is None or self.up_b is None:
            return None
        return LowRank(self.up_a, self.up_b, self.up_scale)

    @property
    def down_adapter(self) -> LowRank | None:
        if self.down_a is None or self.down_b is None:
            return None
        return LowRank(self.down_a, self.down_b, self.down_scale)

    def stack(self, name: str) -> Quantised:
        """The bytes and scales of "up" or "down" where they are quantised."""
        scale: Tensor = getattr(self, name + BLOCK_SCALE)
        return Quantised(getattr(self, name), scale, getattr(self, name + NESTED_SCALE))

    def up_matrices(self, dtype: torch.dtype) -> ExpertMatrices:
        """The matrices [G, H] of the experts, in `dtype` where they are quantised."""
        return self._matrices("up", dtype)

    def down_matrices(self, dtype: torch.dtype) -> ExpertMatrices:
        """The matrices [H, F] of the experts, in `dtype` where they are quantised."""
        return self._matrices("down", dtype)

    def _matrices(self, name: str, dtype: torch.dtype) -> ExpertMatrices:
        if not self.quantised:
            return WholeMatrices(getattr(self, name))
        return DequantisedMatrices(self.stack(name), self.quantised, dtype)

    def named_tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name, in the order of WEIGHT_NAMES."""
        named = {name: getattr(self, name) for name in WEIGHT_NAMES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class Routing:
    """Pairs sorted by expert, int32; see the module's example.

    `tiles` is the work list of the Triton kernels (`sort_pairs`) and `row_A = pair_A // K`, which
    they read in their loops; both are empty elsewhere.
    """

    pair_A: Tensor
    slots_RK: Tensor
    offsets: Tensor
    tiles: Tensor
    row_A: Tensor


@dataclass
class WeightGrads:
    """Gradients of rows, routing weights and the experts' tensors; None where not asked for."""

    rows: Tensor | None = None
    weights: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    down: Tensor | None = None
    down_bias: Tensor | None = None
    up_a: Tensor | None = None
    up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


def empty_grad(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the gradient of `like`: of a matrix as it lies, of anything else contiguous."""
    layout = torch.preserve_format if like.dim() == 3 else torch.contiguous_format
    return torch.empty_like(like, dtype=dtype, memory_format=layout)


class ExpertGrads:
    """Gradients of the experts' tensors, each in its tensor's dtype, or `wide`: in fp32 at least.

    What is added up by several backwards is wide, and rounded once, when it is taken out.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def place(self, name: str, like: Tensor) -> tuple[Tensor, bool]:
        """Memory for the gradient of `like`, and whether there is one, to be added to."""
        if name in self._sums:
            return self._sums[name], True
        dtype = torch.promote_types(like.dtype, torch.float32) if self._wide else like.dtype
        self._sums[name] = empty_grad(like, dtype)
        self._dtypes[name] = like.dtype
        return self._sums[name], False

    def take(self) -> dict[str, Tensor]:
        """Every gradient in the dtype of its tensor, by name; nothing is left here."""
        # One by one: a wide sum is let go before the next one is rounded.
        return {name: self._sums.pop(name).to(self._dtypes[name]) for name in list(self._sums)}

    def __bool__(self) -> bool:
        return bool(self._sums)


@dataclass
class LateGrads:
    """A place for `finish`, which computes the gradients that a backward has left for later.

    Several calls with the same weights share `sums`.
    """

    sums: ExpertGrads = field(default_factory=lambda: ExpertGrads(wide=True))
    finish: Callable[[ExpertGrads], None] | None = None
