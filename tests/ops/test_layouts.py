"""Every layout of experts that an architecture has is one that the Triton kernels are tested in.

Transposed, with biases, without a gate, with which gate: in Triton's interpreter, at sizes that
are no multiples of a block (`expert_cases.FORMULAS`), and compiled ahead of time
(`compile_kernels.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import FORMULAS, layout_of
from support.architectures import model_class, tiny_config
from support.architectures.steps import TRAINED

from hf_moe_ep.architectures import find_parts
from hf_moe_ep.moe.experts import choose_compute
from hf_moe_ep.upstream.experts_interface import experts_flags

# Computed by torch: the kernels know of no norm behind each expert.
NOT_BY_TRITON = {"muse_spark"}


@pytest.fixture(scope="module")
def covered() -> dict[str, list[list[bool | str]]]:
    """The layouts of both kinds of tests."""
    interpreted = [
        layout_of(case.formula, bias=case.bias, transposed=case.transposed)
        for case in FORMULAS.values()
    ]
    return {"interpreted": interpreted, "compiled ahead of time": _compiled()}


def _compiled() -> list[list[bool | str]]:
    """In a process of its own: under TRITON_INTERPRET its modules are others."""
    script = Path(__file__).with_name("compile_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(script.parents[2]), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(script), "--layouts"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def layouts(model_type: str) -> list[list[bool | str]]:
    with torch.device("meta"):
        model = model_class(model_type)(tiny_config(model_type))
    found = []
    for experts in find_parts(model).experts.values():
        flags = experts_flags(experts)
        formula = choose_compute(experts, "torch", recompute=False).formula
        found.append(layout_of(formula, bias=flags.has_bias, transposed=flags.is_transposed))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TRAINED if name not in NOT_BY_TRITON])
def test_layout_is_covered(model_type: str, covered: dict[str, list[list[bool | str]]]) -> None:
    for layout in layouts(model_type):
        for how, known in covered.items():
            assert layout in known, f"{model_type}: {layout} is not {how}"
