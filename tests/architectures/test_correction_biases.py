"""Biases that correct a router's choice stay in fp32, with the values of rank 0.

This holds in a step, in checkpoints and in hub files. The biases have many names, and are buffers
or parameters without a gradient. Biases rounded to bf16 would silently choose other experts.
"""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import tiny
from support.architectures.parts import parts_of
from support.architectures.steps import (
    CUT_LOGITS,
    TEXT_TYPES,
    adamw,
    batches,
    count_tokens,
    loss_of_sum,
)
from support.checks import Check, Found
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep import apply_ep_fsdp2, load_checkpoint, save_checkpoint, save_pretrained

# By model type, the name of the bias in an MoE layer.
CORRECTED = {
    "afmoe": "expert_bias",
    "axk1": "gate.e_score_correction_bias",
    "axk2": "gate.e_score_correction_bias",
    "bailing_hybrid": "gate.e_score_correction_bias",
    "beam": "gate.e_score_correction_bias",
    "deepseek_v3": "gate.e_score_correction_bias",
    "deepseek_v32": "gate.e_score_correction_bias",
    "deepseek_v4": "gate.e_score_correction_bias",
    "dots1": "gate.e_score_correction_bias",
    "dots3_note_text": "gate.e_score_correction_bias",
    "ernie4_5_moe": "gate.moe_statics.e_score_correction_bias",
    "exaone_moe": "gate.e_score_correction_bias",
    "glm4_moe": "gate.e_score_correction_bias",
    "glm4_moe_lite": "gate.e_score_correction_bias",
    "glm_moe_dsa": "gate.e_score_correction_bias",
    "hy_v3": "e_score_correction_bias",
    "hy_v4": "gate.e_score_correction_bias",
    "inkling2_loop_text": "gate.e_score_correction_bias",
    "inkling2_text": "gate.e_score_correction_bias",
    "inkling_text": "gate.e_score_correction_bias",
    "kimi_linear": "gate.e_score_correction_bias",
    "kolibri1": "gate.e_score_correction_bias",
    "laguna": "gate.e_score_correction_bias",
    "lfm2_moe": "expert_bias",
    "longcat_flash": "router.e_score_correction_bias",
    "mimo_v2_flash": "gate.e_score_correction_bias",
    "minimax_m2": "e_score_correction_bias",
    "minimax_m3_vl_text": "gate.e_score_correction_bias",
    "nemotron_h": "gate.e_score_correction_bias",
    "sarvam_mla": "gate.e_score_correction_bias",
    "sarvam_moe": "gate.e_score_correction_bias",
    "solar_open": "gate.e_score_correction_bias",
    "zaya": "gate.balancing_biases",
}
# The bias of one of them is a parameter, that of the other is a buffer.
IN_FAST_SUITE = {"deepseek_v3"}
# Their routers multiply fp32 activations by their weight, which FSDP2 has cast. Without autocast
# this is an error (docs/limits.md).
WITH_AUTOCAST = {"inkling2_loop_text", "inkling2_text"}
POLICIES = {
    "a bf16 model": (torch.bfloat16, None),
    "an fp32 model computed in bf16": (
        torch.float32,
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    ),
}


def find_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the biases without a gradient, by name."""
    named = [*model.named_buffers(), *((n, p) for n, p in model.named_parameters())]
    return {
        name: tensor
        for name, tensor in named
        if tensor.is_floating_point()
        and not tensor.requires_grad
        and name.endswith(("bias", "biases"))
    }


def set_odd_biases(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Give a model biases in fp32 that bf16 would round, and return copies of them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in find_biases(model).values():
        tensor.data = 0.05 * torch.randn(tensor.shape, generator=generator)
    return {name: tensor.detach().clone() for name, tensor in find_biases(model).items()}


def assert_biases(where: str, model: nn.Module, expected: dict[str, Tensor]) -> None:
    present = find_biases(model)
    assert present.keys() == expected.keys(), where
    for name, tensor in present.items():
        assert type(tensor) in (Tensor, nn.Parameter), f"{where}: {name} is sharded"
        assert tensor.dtype == torch.float32, f"{where}: {name} is {tensor.dtype}"
        assert torch.equal(tensor, expected[name]), f"{where}: {name}"


def _check_biases_stay(
    model_type: str, policy_name: str, rank: int, world: int, folder: str
) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dtype, policy = POLICIES[policy_name]
    model = tiny(model_type, dtype=dtype, seed=rank)
    expected = set_odd_biases(tiny(model_type, dtype=dtype), seed=0)
    set_odd_biases(model, seed=rank)
    blocks = [name.rpartition(".")[0] for name in parts_of(model).experts]
    apply_ep_fsdp2(model, ep_size=2, mp_policy=policy)
    checked = []

    def check_biases(*_: object) -> None:
        assert_biases(f"{model_type}, within forward", model, expected)
        checked.append(0)

    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(check_biases)
    optimizer = adamw(model)
    everyone = batches(model, world)
    with torch.autocast("cpu", torch.bfloat16, enabled=model_type in WITH_AUTOCAST):
        loss = loss_of_sum(model, everyone[rank], count_tokens(everyone))
    (loss * world).backward()
    optimizer.step()
    # Some layers of a loop run several times.
    assert len(checked) >= len(blocks) and torch.isfinite(loss)
    assert_biases(f"{model_type}, after a step", model, expected)
    save_checkpoint(f"{folder}/state", model, optimizer)
    resumed = tiny(model_type, dtype=dtype, seed=7 + rank)
    set_odd_biases(resumed, seed=7 + rank)
    apply_ep_fsdp2(resumed, ep_size=1, mp_policy=policy)
    load_checkpoint(f"{folder}/state", resumed, adamw(resumed))
    assert_biases(f"{model_type}, resumed", resumed, expected)
    save_pretrained(model, f"{folder}/hub")
    if rank == 0:
        files = Path(folder, "hub").glob("*.safetensors")
        written = [tensor for file in files for tensor in load_file(file).values()]
        in_fp32 = [tensor for tensor in written if tensor.dtype == torch.float32]
        for name, value in expected.items():
            assert any(torch.equal(x, value) for x in in_fp32), f"{model_type}: {name} in files"


CHECKS = [
    Check(
        f"{name}, {policy_name}",
        2,
        partial(_check_biases_stay, name, policy_name),
        slow=name not in IN_FAST_SUITE or policy_name != "a bf16 model",
    ).as_parameter()
    for name in CORRECTED
    for policy_name in POLICIES
]


@pytest.mark.parametrize("claim", CHECKS)
def test_biases_stay_in_fp32_with_the_values_of_rank_0(found: Found, claim: Check) -> None:
    """Each rank starts from other values. Steps, saved states and hub files have rank 0's."""
    found.raise_if_failed(claim)


@pytest.mark.slow
def test_no_other_type_has_such_a_bias() -> None:
    by_type = {}
    for name in TEXT_TYPES:
        model = tiny(name)
        for bias in find_biases(model):
            (layer,) = (
                e.rpartition(".")[0] for e in parts_of(model).experts if _are_in_one_layer(e, bias)
            )
            by_type[name] = bias.removeprefix(f"{layer}.")
    assert by_type == CORRECTED


def _are_in_one_layer(experts: str, bias: str) -> bool:
    return bias.startswith(f"{experts.rpartition('.')[0]}.")
