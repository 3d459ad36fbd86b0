"""Draw calls of the expert MLP for several test files.

`CASES` has edge cases, and `FORMULAS` has layouts of experts. `draw_with_adapters` draws the inputs
of a call with adapters, and `restride` changes the strides of a tensor.
"""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from hf_moe_ep.ops.formula import ExpertFormula

TORCH = [("torch", "cpu"), pytest.param("torch", "cuda", marks=pytest.mark.gpu)]
TRITON = [
    pytest.param(
        "triton",
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the real kernels run instead"),
    ),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]
BOTH = TORCH + TRITON
NAMES = ("rows", "weights", "up", "up_bias", "down", "down_bias")
ADAPTERS = ("up_a", "up_b", "down_a", "down_b")

GPT_OSS = ExpertFormula(interleaved=True, alpha=1.702, limit=1.5, up_offset=1.0)
# The same gate on concatenated halves, as in MiniMax-M3.
IN_HALVES = ExpertFormula(alpha=1.702, limit=1.5, up_offset=1.0)


@dataclass
class Case:
    """A call with given expert ids and random tensors. Id `num_experts` means "no expert here"."""

    ids: list[list[int]]
    num_experts: int
    hidden: int = 5
    ffn: int = 3
    formula: ExpertFormula = field(default_factory=ExpertFormula)
    bias: bool = False
    transposed: bool = False

    def ids_RK(self, device: str = "cpu") -> Tensor:
        shape = (len(self.ids), len(self.ids[0]) if self.ids else 2)
        return torch.tensor(self.ids, dtype=torch.int64, device=device).reshape(shape)

    def counts_L(self) -> list[int]:
        flat = list(itertools.chain.from_iterable(self.ids))
        return [flat.count(expert) for expert in range(self.num_experts)]

    def draw_inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor | None]:
        """Draw the inputs in the order of NAMES. Outputs are about as large as rows."""
        (rows, top_k), experts = self.ids_RK().shape, self.num_experts
        pre_size = 2 * self.ffn if self.formula.gated else self.ffn

        def draw_matrix(out_size: int, in_size: int) -> Tensor:
            values = torch.randn(experts, out_size, in_size, dtype=torch.float64) / in_size**0.5
            return values.mT.contiguous().mT if self.transposed else values

        def draw_vector(size: int) -> Tensor | None:
            return torch.randn(experts, size, dtype=torch.float64) if self.bias else None

        values = [
            torch.randn(rows, self.hidden, dtype=torch.float64),
            torch.rand(rows, top_k, dtype=torch.float64) + 0.1,
            draw_matrix(pre_size, self.hidden),
            draw_vector(pre_size),
            draw_matrix(self.hidden, self.ffn),
            draw_vector(self.hidden),
        ]
        return [None if x is None else x.to(device, dtype) for x in values]


def draw_ids(rows: int, top_k: int, num_experts: int, seed: int) -> list[list[int]]:
    """Draw ids for each row: about half of them are "no expert here", the others are distinct."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, 2 * num_experts, generator=generator).argsort(1)[:, :top_k]
    return order.clamp(max=num_experts).tolist()


def _clamp(ids: list[list[int]], num_experts: int) -> list[list[int]]:
    """Replace the ids from `num_experts` on by "no expert here"."""
    return [[min(expert, num_experts) for expert in row] for row in ids]


CASES = {
    "docstring": Case([[1, 0], [0, 2]], 2),
    "random": Case(draw_ids(23, 3, 5, seed=1), 5, hidden=11, ffn=7),
    "empty experts": Case([[3, 1], [1, 3], [3, 5]], 5),
    "all rows on one expert": Case([[2, 4], [2, 4], [4, 2], [2, 4]], 4),
    "nothing here": Case([[3, 3], [3, 3]], 3),
    "one pair": Case([[1]], 2, hidden=1, ffn=1),
    "one expert": Case([[0, 1], [1, 0], [1, 1]], 1),
    "one expert, several tiles": Case(_clamp(draw_ids(45, 2, 2, seed=4), 1), 1),
    "fewer experts than choices": Case(_clamp(draw_ids(23, 4, 5, seed=5), 2), 2, hidden=11, ffn=7),
    "top-1": Case([[1], [0], [1], [2]], 2),
    "every expert, every row": Case([[2, 0, 1], [0, 1, 2]], 3),
    "no rows": Case([], 3),
}
# An expert has more pairs than a tile holds, and the sizes are not multiples of a block.
_IDS = draw_ids(45, 2, 3, seed=2)
FORMULAS = {
    "silu": Case(_IDS, 3, 40, 24),
    "silu, bias": Case(_IDS, 3, 40, 24, bias=True),
    "transposed": Case(_IDS, 3, 40, 24, transposed=True),
    "interleaved": Case(_IDS, 3, 40, 24, ExpertFormula(interleaved=True)),
    "clamped": Case(_IDS, 3, 40, 24, ExpertFormula(limit=0.7)),
    "gpt-oss": Case(_IDS, 3, 40, 24, GPT_OSS, bias=True, transposed=True),
    "gpt-oss in halves": Case(_IDS, 3, 40, 24, IN_HALVES),
    "privacy filter": Case(_IDS, 3, 40, 24, IN_HALVES, bias=True, transposed=True),
    "gelu": Case(_IDS, 3, 40, 24, ExpertFormula(activation="gelu")),
    "gelu_tanh": Case(_IDS, 3, 40, 24, ExpertFormula(activation="gelu_tanh")),
    "no gate, relu2": Case(_IDS, 3, 40, 24, ExpertFormula(gated=False, activation="relu2")),
    "no gate, bias": Case(_IDS, 3, 40, 24, ExpertFormula(gated=False), bias=True),
    "no gate, clamped": Case(_IDS, 3, 40, 24, ExpertFormula(gated=False, limit=0.7)),
}
# Formulas that the Triton kernels do not compute.
_CAPPED = ExpertFormula(gate_cap=0.9, up_cap=1.3)
_CLAMPED_OUTPUT = ExpertFormula(activation="swish_clamped", limit=0.7)
ONLY_TORCH = {
    "soft caps": Case(_IDS, 3, 40, 24, _CAPPED),
    "soft caps, interleaved": Case(_IDS, 3, 40, 24, replace(_CAPPED, interleaved=True), bias=True),
    "a soft cap of the gate": Case(_IDS, 3, 40, 24, ExpertFormula(gate_cap=0.9)),
    "silu, clamped output": Case(_IDS, 3, 40, 24, _CLAMPED_OUTPUT, bias=True),
}


def describe_layout(formula: ExpertFormula, *, bias: bool, transposed: bool) -> list[bool | str]:
    """Return the properties of an experts module, besides sizes, for which kernels are compiled.

    A clamp is a property, but its limit is not, because another limit needs no other code.
    """
    return [
        formula.gated,
        formula.interleaved,
        formula.activation,
        formula.alpha != 1,
        formula.clamped,
        formula.up_offset != 0,
        bias,
        transposed,
    ]


def draw_with_adapters(
    case: Case, rank: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Tensor | None]:
    """Draw the inputs of a case, with adapters of this rank, and return them by name."""
    named = dict(zip(NAMES, case.draw_inputs(dtype, device), strict=True))
    for name in ("up", "down"):
        experts, out_size, in_size = named[name].shape
        a = torch.randn(experts, rank, in_size, dtype=torch.float64) / in_size**0.5
        b = torch.randn(experts, out_size, rank, dtype=torch.float64) / rank**0.5
        named |= {f"{name}_a": a.to(device, dtype), f"{name}_b": b.to(device, dtype)}
    return named


def restride(x: Tensor) -> list[Tensor]:
    """Return two tensors with the values of x: one with transposed strides, and one with gaps."""
    other = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    hole = float("nan") if x.is_floating_point() else 1 << 40
    gaps = torch.stack([x, torch.full_like(x, hole)], dim=-1)[..., 0]
    return [other, gaps]
