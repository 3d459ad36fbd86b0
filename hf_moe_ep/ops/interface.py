"""Define the data structures that the implementations of the expert MLP share.

    ExpertWeights    the stacked matrices, biases and adapters of the experts on this rank
    LowRank          the two factors of an adapter
    LowRows          the two factors of an adapter's second product, which a Triton kernel adds
    Routing          the (row, expert) pairs, sorted by expert
    ExpertGrads      gradients of the experts' tensors, to which several backward passes may add
    PostponedGrads   a function that computes these gradients after the backward of `expert_mlp`

An example of `Routing` with two experts and top-2. Row 1 goes to expert 0 only (id 2 means "no
expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   pairs are numbered row by row: 0 1 2 3
    pair_A   = [1, 2, 0]               pairs sorted by expert: expert 0 has pairs 1, 2
    offsets  = [0, 2, 3]               expert e has positions offsets[e] .. offsets[e + 1] - 1
    position_RK = [[2, 0], [1, 3]]     the position of each pair in pair_A. A = 3 pairs have an
                                       expert. The entry 3 means that the pair has no position

`moe/layer.py` has the legend of the shape letters, which are suffixes of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_moe_ep.ops.quantised import (
    BLOCK_SCALE,
    NESTED_SCALE,
    Quantisation,
    Quantised,
    dequantise,
)

# The tensors of ExpertWeights, in the order of the operators' arguments.
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
    """An adapter of rank P, which adds `scale * b_LOP @ a_LPI` to the experts' matrices."""

    a_LPI: Tensor
    b_LOP: Tensor
    scale: float

    def transposed(self) -> LowRank:
        """Return the adapter of the transposed matrices, which backward multiplies gradients by."""
        return LowRank(self.b_LOP.transpose(1, 2), self.a_LPI.transpose(1, 2), self.scale)


@dataclass(frozen=True)
class LowRows:
    """The factors of an adapter's second product, `low_AP @ b_LPO[expert]`.

    `low_AP` is the result of the first product. The kernel that multiplies rows by the expert's
    matrix adds the second product to its sums.
    Both tensors are None if the matrix has no adapter.
    """

    low_AP: Tensor | None = None
    b_LPO: Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.low_AP is None else self.low_AP.shape[1]

    def list_kernel_arguments(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Return both tensors and the three strides of `b_LPO`."""
        stride_l, stride_p, stride_o = (0, 0, 0) if self.b_LPO is None else self.b_LPO.stride()
        return self.low_AP, self.b_LPO, stride_l, stride_p, stride_o


NO_ADAPTER = LowRows()


class Masters:
    """Casts the master weights `up` and `down` to the compute dtype, once for all chunks of rows.

    The copies are not saved for backward. Backward casts the masters again.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copies: dict[str, Tensor] = {}

    def cast(self, name: str, master: Tensor) -> Tensor:
        """Return the copy of the matrices `name`, "up" or "down"."""
        if name not in self._copies:
            self._copies[name] = master.detach().to(self.dtype)
        return self._copies[name]

    def forget(self) -> None:
        """Free the copies."""
        self._copies.clear()


# Nothing changes the objects of this class, of `Routing` and of `_GradInputs` in `triton_mlp.py`.
# They are not frozen, because a frozen object takes the host three times as long to make.
@dataclass
class ExpertWeights:
    """The tensors of the experts on this rank. G is 2 F, or F without a gate.

    The matrices are up [L, G, H] and down [L, H, F], with any strides. The biases are up [L, G] and
    down [L, H]. The factors of the adapters are up_a [L, P, H], up_b [L, G, P], down_a [L, P, F]
    and down_b [L, H, P], in the dtype of the matrices. Missing biases and factors are None.

    If `quantised` names a format of `quantised.py`, up and down are the bytes of this format, and
    the scale tensors are set. Bytes and scales have no gradient, and biases and factors have the
    dtype of the rows. `postpone_grads` sets `postponed`. If `masters` is set, up and down are
    master weights, which are cast before they are multiplied.
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
    postponed: PostponedGrads | None = None
    masters: Masters | None = None

    def adapter(self, name: str) -> LowRank | None:
        """Return the adapter of the matrices `name`, "up" or "down"."""
        a, b = getattr(self, name + "_a"), getattr(self, name + "_b")
        if a is None or b is None:
            return None
        return LowRank(a, b, getattr(self, name + "_scale"))

    def stack(self, name: str) -> Quantised:
        """Return the bytes and scales of the quantised matrices `name`, "up" or "down"."""
        scale: Tensor = getattr(self, name + BLOCK_SCALE)
        return Quantised(getattr(self, name), scale, getattr(self, name + NESTED_SCALE))

    def matrix(self, name: str, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix `name` [O, I] of one expert. Bytes are dequantised to `dtype`."""
        if not self.quantised:
            weight_LOI: Tensor = getattr(self, name)
            return weight_LOI[expert]
        return dequantise(self.stack(name).matrix_of(expert), self.quantised, dtype)

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return (O, I) of the matrices `name`."""
        stored: Tensor = getattr(self, name)
        per_byte = Quantisation(self.quantised).values_per_byte if self.quantised else 1
        return stored.shape[1], stored.shape[2] * per_byte

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, in the order of WEIGHT_NAMES."""
        named = self.__dict__
        return {name: x for name in WEIGHT_NAMES if (x := named[name]) is not None}


@dataclass
class Routing:
    """The pairs sorted by expert, as int32 tensors. The module docstring has an example.

    `tiles` is the work list of the Triton kernels (`sort_pairs`). `row_A` is `pair_A // K`, so that
    the kernels' loops need no division. The torch path leaves both empty.
    """

    pair_A: Tensor
    position_RK: Tensor
    offsets: Tensor
    tiles: Tensor
    row_A: Tensor


def allocate_grad(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate the gradient of `like`. The gradient of a stack of matrices has their strides."""
    layout = torch.preserve_format if like.dim() == 3 else torch.contiguous_format
    return torch.empty_like(like, dtype=dtype, memory_format=layout)


class GradBuffer(NamedTuple):
    """The memory of a gradient. If `add` is True, the caller adds to `grad`, else overwrites it."""

    grad: Tensor
    add: bool


class ExpertGrads:
    """Gradients of the experts' tensors, by name.

    Each gradient has the dtype of its tensor. With `wide` the gradients of several backward passes
    are accumulated in fp32 or wider, and `take` rounds each sum once.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def buffer(self, name: str, like: Tensor) -> GradBuffer:
        """Return the memory for the gradient of the tensor `like`.

        The first call for a name allocates the memory. All later calls return this memory with
        `add=True`.
        """
        if name in self._sums:
            return GradBuffer(self._sums[name], add=True)
        dtype = torch.promote_types(like.dtype, torch.float32) if self._wide else like.dtype
        self._sums[name] = allocate_grad(like, dtype)
        self._dtypes[name] = like.dtype
        return GradBuffer(self._sums[name], add=False)

    def take(self) -> dict[str, Tensor]:
        """Remove all gradients and return them, each in the dtype of its tensor."""
        # `pop` frees each wide sum before the next sum is rounded.
        return {name: self._sums.pop(name).to(self._dtypes[name]) for name in list(self._sums)}

    def __bool__(self) -> bool:
        return bool(self._sums)


@dataclass
class PostponedGrads:
    """The experts' gradients of one `expert_mlp` call, which are computed after its backward.

    The backward sets `finish`. `finish(grads)` computes the gradients and adds them to `grads`.
    Calls for other chunks of rows with the same weights share `sums`. If there are such calls,
    `in_chunks` is True from the end of the forward on.
    """

    sums: ExpertGrads = field(default_factory=lambda: ExpertGrads(wide=True))
    finish: Callable[[ExpertGrads], None] | None = None
    in_chunks: bool = False

    def for_next_chunk(self) -> PostponedGrads:
        """Return the gradients of another chunk, which are added to the same sums."""
        self.in_chunks = True
        return PostponedGrads(self.sums, in_chunks=True)
