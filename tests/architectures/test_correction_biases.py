"""Biases that correct a router's choice stay what they are: in fp32, rank 0's, in every checkpoint.

Whatever they are called, wherever they stand, buffers or parameters without gradient. Rounded to
bf16 they would choose other experts, without any error to be seen.
"""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import tiny
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
from hf_moe_ep.architectures import find_parts

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
    "inkling_text": "gate.e_score_correction_bias",
    "kimi_linear": "gate.e_score_correction_bias",
    "kolibri1": "gate.e_score_correction_bias",
    "laguna": "gate.e_score_correction_bias",
    "lfm2_moe": "expert_bias",
    "mimo_v2_flash": "gate.e_score_correction_bias",
    "minimax_m2": "e_score_correction_bias",
    "minimax_m3_vl_text": "gate.e_score_correction_bias",
    "nemotron_h": "gate.e_score_correction_bias",
    "solar_open": "gate.e_score_correction_bias",
    "zaya": "gate.balancing_biases",
}
# One that is a parameter and one that is a buffer stand for all.
IN_FAST_SUITE = {"afmoe", "deepseek_v3"}
POLICIES = {
    "a bf16 model": (torch.bfloat16, None),
    "an fp32 model computed in bf16": (
        torch.float32,
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    ),
}


def biases(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the routers that no gradient reaches, by their names."""
    named = [*model.named_buffers(), *((n, p) for n, p in model.named_parameters())]
    return {
        name: tensor
        for name, tensor in named
        if tensor.is_floating_point()
        and not tensor.requires_grad
        and name.endswith(("bias", "biases"))
    }


def odd_values(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Give a model biases in fp32 that bf16 cannot hold; returns copies."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in biases(model).values():
        tensor.data = 0.05 * torch.randn(tensor.shape, generator=generator)
    return {name: tensor.detach().clone() for name, tensor in biases(model).items()}


def assert_held(where: str, model: nn.Module, want: dict[str, Tensor]) -> None:
    found = biases(model)
    assert found.keys() == want.keys(), where
    for name, tensor in found.items():
        assert type(tensor) in (Tensor, nn.Parameter), f"{where}: {name} is sharded"
        assert tensor.dtype == torch.float32, f"{where}: {name} is {tensor.dtype}"
        assert torch.equal(tensor, want[name]), f"{where}: {name}"


def _stay(model_type: str, kind: str, rank: int, world: int, folder: str) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dtype, policy = POLICIES[kind]
    model = tiny(model_type, dtype=dtype, seed=rank)
    want = odd_values(tiny(model_type, dtype=dtype), seed=0)
    odd_values(model, seed=rank)
    experts = list(find_parts(model).experts.values())
    apply_ep_fsdp2(model, ep_size=2, mp_policy=policy)
    seen = []

    def look(*_: object) -> None:
        assert_held(f"{model_type}, within forward", model, want)
        seen.append(0)

    for module in experts:
        module.register_forward_pre_hook(look)
    optimizer = adamw(model)
    everyone = batches(model, world)
    loss = loss_of_sum(model, everyone[rank], count_tokens(everyone))
    (loss * world).backward()
    optimizer.step()
    assert len(seen) == len(experts) and torch.isfinite(loss)
    assert_held(f"{model_type}, after a step", model, want)
    save_checkpoint(f"{folder}/state", model, optimizer)
    other = tiny(model_type, dtype=dtype, seed=7 + rank)
    odd_values(other, seed=7 + rank)
    apply_ep_fsdp2(other, ep_size=1, mp_policy=policy)
    load_checkpoint(f"{folder}/state", other, adamw(other))
    assert_held(f"{model_type}, resumed", other, want)
    save_pretrained(model, f"{folder}/hub")
    if rank == 0:
        files = Path(folder, "hub").glob("*.safetensors")
        written = [tensor for file in files for tensor in load_file(file).values()]
        in_fp32 = [tensor for tensor in written if tensor.dtype == torch.float32]
        for name, value in want.items():
            assert any(torch.equal(x, value) for x in in_fp32), f"{model_type}: {name} in files"


CHECKS = [
    Check(
        f"{name}, {kind}",
        2,
        partial(_stay, name, kind),
        slow=name not in IN_FAST_SUITE or kind != "a bf16 model",
    ).as_parameter()
    for name in CORRECTED
    for kind in POLICIES
]


@pytest.mark.parametrize("claim", CHECKS)
def test_biases_stay(found: Found, claim: Check) -> None:
    """Each rank starts from other values; steps, saved states and hub files keep rank 0's."""
    found.raise_if_failed(claim)


@pytest.mark.slow
def test_these_are_all_that_have_one() -> None:
    found = {}
    for name in TEXT_TYPES:
        model = tiny(name)
        for bias in biases(model):
            (layer,) = (e.rpartition(".")[0] for e in find_parts(model).experts if _beside(e, bias))
            found[name] = bias.removeprefix(f"{layer}.")
    assert found == CORRECTED


def _beside(experts: str, bias: str) -> bool:
    return bias.startswith(f"{experts.rpartition('.')[0]}.")
