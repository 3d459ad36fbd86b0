"""LoRA on the experts of types with pictures or sound, against stock PEFT on stock in one process.

On each stacked matrix of the experts, those of pictures among them, and on every linear layer of
the decoder and the towers; a step of text, then steps where one rank has pictures.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import expert_matrices
from support.architectures import MODEL_TYPES, recording
from support.architectures.mixes import (
    COMPOSITES,
    TYPES,
    Make,
    build,
    image,
    images,
    parts,
    sound,
    text,
)
from support.architectures.pictures import takes_sound
from support.architectures.precision import budget
from support.architectures.steps import adamw, whole
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from torch import nn

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.upstream.models import output_head


def everywhere(name: str, seed: int) -> PeftModel:
    """Random adapters on all experts and all linear layers, of towers too."""
    model = build(name)
    head = output_head(model)
    # By whole names: a layer in a Sequential is called 0, like others that are not linear.
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    return _adapted(model, seed, target_modules=linear)


def experts_alone(name: str, seed: int) -> PeftModel:
    return _adapted(build(name), seed)


def beside_a_whole_projector(name: str, seed: int) -> PeftModel:
    """PEFT trains a copy of the module that joins a tower to the text."""
    model = build(name)
    *_, projector = parts(model)
    return _adapted(model, seed, modules_to_save=[projector.rpartition(".")[2]])


def _adapted(model: nn.Module, seed: int, **options: Any) -> PeftModel:
    torch.manual_seed(seed)
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(target_parameters=expert_matrices(model), **options))


def assert_equals_peft(adapted: Any, name: str, rank: int, world: int) -> list[float]:
    """Compare losses, gradients and a step of AdamW of each mix with stock PEFT: the errors."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # views: nobody writes them
    model, stock = adapted(name, seed=rank), adapted(name, seed=0)
    bare = stock.get_base_model()
    trained = [key for key, p in stock.named_parameters() if p.requires_grad]
    assert any("experts" in key for key in trained), trained
    apply_ep_fsdp2(model, ep_size=2)
    optimizers = adamw(model), adamw(stock)
    steps: list[tuple[Make, Make]] = [(text, text), (images, text), (text, image)]
    if takes_sound(bare):
        steps.append((sound, text))
    errors = []
    for step, makes in enumerate(steps):
        where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
        everyone = [make(bare, 10 * step + i) for i, make in enumerate(makes)]
        loss = model(**everyone[rank]).loss
        (loss * world).backward()
        want = torch.stack([stock(**one).loss for one in everyone]).sum()
        want.backward()
        errors.append(assert_close(f"{where}: loss", sum_over_ranks(loss), want, budget(name)))
        errors += _compare(f"{where}: grad of", name, model, stock, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return errors + _compare(f"{name}, at the end:", name, model, stock, "data")


def _compare(where: str, name: str, model: nn.Module, stock: nn.Module, what: str) -> list[float]:
    mine = {key: getattr(p, what) for key, p in model.named_parameters()}
    got = whole(model, {key: tensor for key, tensor in mine.items() if tensor is not None})
    errors = []
    for key, parameter in stock.named_parameters():
        want = getattr(parameter, what)
        if want is None or key not in got:
            assert want is None and key not in got, f"{where} {key}: one has none"
            continue
        # AdamW divides a gradient by its own size: see support/parity.py.
        allowed = budget(name) * (100 if what == "data" and budget(name) >= FP32_INSIDE else 1)
        errors.append(assert_close(f"{where} {key}", got[key], want, allowed))
    return errors


def _run(adapted: Any, name: str, rank: int, world: int) -> None:
    if name not in MODEL_TYPES:
        assert_equals_peft(adapted, name, rank, world)
        return
    with recording(name, "lora") as errors:
        errors += assert_equals_peft(adapted, name, rank, world)


def _checks() -> list[Any]:
    found = {name: partial(_run, everywhere, name) for name in (*TYPES, *COMPOSITES)}
    for name in ("qwen3_vl_moe", "ernie4_5_vl_moe", "kimi_k25"):
        found[f"{name}: experts alone"] = partial(_run, experts_alone, name)
    for name in ("gemma4", "kimi_k25"):
        found[f"{name}: whole projector"] = partial(_run, beside_a_whole_projector, name)
    return [
        Check(name, 2, run, slow=True, timeout=120.0).as_parameter() for name, run in found.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("claim", _checks())
def test_adapters_where_ranks_have_other_pictures(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
