"""The Triton kernels are tested with the experts' layout of every architecture.

A layout is: transposed or not, with or without biases and gate, and the formula of the gate. Tests
run the kernels with the layouts in `expert_cases.FORMULAS`, so this table must hold all of them.
"""

import pytest
import torch
from expert_cases import FORMULAS, layout_of
from support.architectures import MODEL_TYPES, model_class, tiny_config
from support.architectures.parts import parts_of

from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.upstream.experts_interface import experts_flags

# The kernels have no norm after each expert and clamp no output of an activation, so torch computes
# the experts of these types.
NOT_BY_TRITON = {"muse_spark", "step3p7"}


def _layouts(model_type: str) -> list[list[bool | str]]:
    with torch.device("meta"):
        model = model_class(model_type)(tiny_config(model_type))
    layouts = []
    for experts in parts_of(model).experts.values():
        flags = experts_flags(experts)
        formula = choose_compute(experts, "torch", recompute=False).formula
        layouts.append(layout_of(formula, bias=flags.has_bias, transposed=flags.is_transposed))
    return layouts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NOT_BY_TRITON])
def test_layout_is_covered(model_type: str) -> None:
    covered = [
        layout_of(case.formula, bias=case.bias, transposed=case.transposed)
        for case in FORMULAS.values()
    ]
    for layout in _layouts(model_type):
        assert layout in covered, f"{model_type}: no case of FORMULAS has {layout}"
