"""What the implementations of the expert MLP hand each other.

    ExpertWeights   the stacked matrices and biases of the experts on this rank
    Routing         which pair sits where once pairs are sorted by expert
    WeightGrads     the gradients a backward was asked for

Two experts, top-2, row 1 going to expert 0 only (id 2 = "no expert here"):

    expert_ids_RK = [[1, 0], [0, 2]]   pairs are numbered row by row: 0 1 2 3
    pair_A   = [1, 2, 0]               by expert, in row order: expert 0 gets pairs 1, 2
    offsets  = [0, 2, 3]               expert e has positions offsets[e] .. offsets[e + 1] - 1
    slots_RK = [[2, 0], [1, 3]]        the position of each pair; 3 = A for "nowhere"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """up_LGH, down_LHF and biases up_LG, down_LH; any strides. `late`: see `postpone_grads`."""

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    late: LateGrads | None = None


@dataclass
class LateGrads:
    """`finish` computes the gradients of the experts that a backward has left for later."""

    finish: Callable[[], WeightGrads] | None = None


@dataclass(frozen=True)
class Routing:
    """See the module's example; int32. `tiles` is the Triton path's map from tile to pairs."""

    pair_A: Tensor
    slots_RK: Tensor
    offsets: Tensor
    tiles: Tensor


@dataclass
class WeightGrads:
    """None is "not asked for"."""

    rows: Tensor | None = None
    weights: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    down: Tensor | None = None
    down_bias: Tensor | None = None

    def as_list(self) -> list[Tensor | None]:
        return [self.rows, self.weights, self.up, self.up_bias, self.down, self.down_bias]
