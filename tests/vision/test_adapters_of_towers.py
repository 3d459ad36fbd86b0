"""LoRA on types with pictures or sound equals PEFT on the stock model in one process.

The models have adapters on each stacked expert matrix, including experts for pictures, and on every
linear layer of the decoder and the towers. In the first step all ranks have text, and in the other
steps one rank has pictures or sound.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import expert_matrices
from support.architectures import MODEL_TYPES, recording
from support.architectures.inputs import loss_of
from support.architectures.mixes import (
    COMPOSITES,
    TYPES,
    MakeBatch,
    build,
    list_encoder_names,
    make_image,
    make_images,
    make_sound,
    make_text,
)
from support.architectures.pictures import takes_pictures, takes_sound
from support.architectures.precision import budget
from support.architectures.steps import adamw, exactly, whole
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from torch import nn

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.upstream.models import get_output_head


def build_with_adapters_everywhere(name: str, seed: int) -> PeftModel:
    """Add random adapters to all experts and to all linear layers, also in the towers."""
    model = build(name)
    head = get_output_head(model)
    # PEFT gets whole names, because the last part of a name may be 0 for several modules.
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    return _add_adapters(model, seed, target_modules=linear)


def build_with_adapters_on_experts(name: str, seed: int) -> PeftModel:
    return _add_adapters(build(name), seed)


def build_with_trained_projector(name: str, seed: int) -> PeftModel:
    """Add adapters to experts, and let PEFT train a copy of the projector (modules_to_save)."""
    model = build(name)
    *_, projector = list_encoder_names(model)
    return _add_adapters(model, seed, modules_to_save=[projector.rpartition(".")[2]])


def _add_adapters(model: nn.Module, seed: int, **options: Any) -> PeftModel:
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(target_parameters=expert_matrices(model), **options))


def assert_equals_peft(build_adapted: Any, name: str, rank: int, world: int) -> list[float]:
    """Compare losses, gradients and AdamW steps with stock PEFT; return the errors."""
    with exactly(name):
        return _compare_steps(build_adapted, name, rank, world)


def _compare_steps(build_adapted: Any, name: str, rank: int, world: int) -> list[float]:
    # FSDP2 warns of views among a module's outputs. Nothing modifies these views in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    model, stock = build_adapted(name, seed=rank), build_adapted(name, seed=0)
    bare = stock.get_base_model()
    trained = [key for key, p in stock.named_parameters() if p.requires_grad]
    assert any("experts" in key for key in trained), trained
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = adamw(model), adamw(stock)
    steps: list[tuple[MakeBatch, MakeBatch]] = [(make_text, make_text)]
    if takes_pictures(bare):
        steps += [(make_images, make_text), (make_text, make_image)]
    if takes_sound(bare):
        steps.append((make_sound, make_text))
    errors = []
    for step, makes in enumerate(steps):
        where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
        everyone = [make(bare, 10 * step + i) for i, make in enumerate(makes)]
        loss = loss_of(model, everyone[rank])
        (loss * world).backward()
        want = torch.stack([loss_of(stock, x) for x in everyone]).sum()
        want.backward()
        errors.append(assert_close(f"{where}: loss", sum_over_ranks(loss), want, budget(name)))
        errors += _compare(f"{where}: grad of", name, model, stock, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors + _compare(f"{name}, at the end:", name, model, stock, "data")


def _compare(
    where: str, name: str, model: nn.Module, stock: nn.Module, attribute: str
) -> list[float]:
    tensors = {key: getattr(p, attribute) for key, p in model.named_parameters()}
    got = whole(model, {key: tensor for key, tensor in tensors.items() if tensor is not None})
    errors = []
    for key, parameter in stock.named_parameters():
        want = getattr(parameter, attribute)
        if want is None or key not in got:
            assert want is None and key not in got, f"{where} {key}: only one model has it"
            continue
        # AdamW divides each gradient by its own magnitude (support/parity.py explains the factor).
        allowed = budget(name) * (100 if attribute == "data" and budget(name) >= FP32_INSIDE else 1)
        errors.append(assert_close(f"{where} {key}", got[key], want, allowed))
    return errors


def _run(build_adapted: Any, name: str, rank: int, world: int) -> None:
    if name not in MODEL_TYPES:
        assert_equals_peft(build_adapted, name, rank, world)
        return
    with recording(name, "lora") as errors:
        errors += assert_equals_peft(build_adapted, name, rank, world)


def _list_checks() -> list[Any]:
    runs = {
        name: partial(_run, build_with_adapters_everywhere, name) for name in (*TYPES, *COMPOSITES)
    }
    for name in ("qwen3_vl_moe", "ernie4_5_vl_moe", "kimi_k25"):
        runs[f"{name}: experts alone"] = partial(_run, build_with_adapters_on_experts, name)
    for name in ("gemma4", "kimi_k25"):
        runs[f"{name}: whole projector"] = partial(_run, build_with_trained_projector, name)
    return [
        Check(name, 2, run, slow=True, timeout=120.0).as_parameter() for name, run in runs.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("claim", _list_checks())
def test_adapters_on_ranks_with_different_inputs_equal_peft(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
