"""The Triton kernels are tested with the experts' layout of every architecture.

A layout says if the matrices are transposed, if there are biases and a gate, and which formula the
gate has. Tests run the kernels with the layouts in `expert_cases.FORMULAS`, so this table must hold
the layouts of all architectures.
"""

import pytest
import torch
from expert_cases import FORMULAS, describe_layout
from support.architectures import MODEL_TYPES, model_class, tiny_config
from support.architectures.parts import parts_of

from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.upstream.experts_interface import get_experts_flags

# The kernels neither have a norm after each expert nor clamp the output of an activation, so torch
# computes the experts of these types.
NOT_BY_TRITON = {"muse_spark", "step3p7"}


def _list_layouts(model_type: str) -> list[list[bool | str]]:
    with torch.device("meta"):
        model = model_class(model_type)(tiny_config(model_type))
    layouts = []
    for experts in parts_of(model).experts.values():
        flags = get_experts_flags(experts)
        formula = choose_compute(experts, "torch", recompute=False).formula
        layouts.append(
            describe_layout(formula, bias=flags.has_bias, transposed=flags.is_transposed)
        )
    return layouts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NOT_BY_TRITON])
def test_formulas_cover_the_layouts_of_each_architecture(model_type: str) -> None:
    covered = [
        describe_layout(case.formula, bias=case.bias, transposed=case.transposed)
        for case in FORMULAS.values()
    ]
    for layout in _list_layouts(model_type):
        assert layout in covered, f"{model_type}: no case of FORMULAS has {layout}"
