"""What travels through the operators as text comes out as it went in."""

import math
from dataclasses import replace

import pytest
import torch

from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.spec import ExpertSpec

# No field has the value of its default.
OTHER = ExpertSpec(
    ExpertFormula(False, True, "gelu_tanh", 1.702, 7.0, 1.0),
    ("up", "down", "down_bias"),
    up_scale=0.5,
    down_scale=2.0,
    grad_scale=1 / 3,
    keep_pre=False,
    trained=("rows", "down"),
    backend="triton",
    quantised="nf4",
)


def test_the_text_by_hand() -> None:
    assert OTHER.to_text() == (
        "gated=False interleaved=True activation=gelu_tanh alpha=0x1.b3b645a1cac08p+0 "
        "limit=0x1.c000000000000p+2 up_offset=0x1.0000000000000p+0 tensors=up,down,down_bias "
        "up_scale=0x1.0000000000000p-1 down_scale=0x1.0000000000000p+1 "
        "grad_scale=0x1.5555555555555p-2 keep_pre=False "
        "trained=rows,down backend=triton quantised=nf4"
    )


@pytest.mark.parametrize("spec", [OTHER, ExpertSpec(ExpertFormula(), ("up", "down"))])
def test_the_text_reads_back(spec: ExpertSpec) -> None:
    assert ExpertSpec.from_text(spec.to_text()) == spec


@pytest.mark.parametrize("number", [math.inf, 0.1, 5e-324, -1.7976931348623157e308, 3, 1 / 8])
def test_numbers_keep_their_bits(number: float) -> None:
    spec = replace(OTHER, grad_scale=number, formula=ExpertFormula(limit=number))
    read = ExpertSpec.from_text(spec.to_text())
    assert (read.grad_scale, read.formula.limit) == (number, number)


def test_tensors_get_their_names_back() -> None:
    up, down, bias = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    named = OTHER.experts([up, down, bias])
    assert isinstance(named, ExpertWeights)
    assert named.up is up and named.down is down and named.down_bias is bias
    assert named.up_bias is None and named.up_a is None
    assert (named.up_scale, named.down_scale) == (0.5, 2.0)
    assert tuple(named.named_tensors()) == ("up", "down", "down_bias")
    with pytest.raises(ValueError):
        OTHER.experts([up, down])
