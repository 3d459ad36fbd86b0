"""Every MoE type with pictures or sound equals stock in one process, with any mix of them over
ranks.

Tiny models in fp64 (`support.architectures.precision` lists what stock computes in fp32) on 2
ranks, with experts split over them. One model runs all mixes. A gradient that is None in stock is
None here, so weight decay moves no unused tower.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, recording
from support.architectures.inputs import loss_of
from support.architectures.mixes import (
    COMPOSITES,
    TYPES,
    Make,
    build,
    image,
    images,
    mixes,
    parts,
    text,
)
from support.architectures.precision import budget
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import assert_same_gradients, checkpointing, full_tensor
from torch import nn

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.derive import derive_plan
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.upstream.sharded_models import is_gathered


def assert_equals_stock(
    name: str,
    rank: int,
    world: int,
    *,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    data: Callable[[nn.Module], list[tuple[Make, Make]]] = mixes,
    **config: Any,
) -> list[float]:
    """Compare losses and gradients of every mix, and weights after one more step, with stock."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # views: nobody writes them
    errors = []
    model, stock = build(name, seed=rank), build(name)
    for one in (model, stock):
        prepare(one)
    apply_ep_fsdp2(model, **({"ep_size": 2} | config))
    ours = dict(model.named_parameters())
    steps = data(stock)
    for step, makes in enumerate(steps):
        where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
        everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes)]
        loss = loss_of(model, everyone[rank])
        (loss * world).backward()
        want = torch.stack([loss_of(stock, one) for one in everyone]).sum()
        want.backward()
        errors.append(assert_close(f"{where}: loss", sum_over_ranks(loss), want, budget(name)))
        errors += assert_same_gradients(where, model, stock, partial(budget, name))
        for one in (model, stock) if step < len(steps) - 1 else ():
            one.zero_grad()
    for one in (model, stock):
        torch.optim.SGD(one.parameters(), lr=0.01, weight_decay=0.1).step()
    for key, parameter in stock.named_parameters():
        got = full_tensor(ours[key].detach())
        wanted = budget(name, key)
        errors.append(assert_close(f"{name}: {key} after a step", got, parameter, wanted))
    return errors


def frozen_towers(model: nn.Module) -> None:
    for name in parts(model):
        model.get_submodule(name).requires_grad_(False)


def frozen_towers_before_a_trained_projector(model: nn.Module) -> None:
    """In the first stage of many recipes the language model is frozen, too."""
    model.requires_grad_(False)
    *_, projector = parts(model)
    model.get_submodule(projector).requires_grad_(True)


def frozen_text(model: nn.Module) -> None:
    names = parts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(names))


def with_input_gradients(model: Any) -> None:
    """PEFT needs this under reentrant checkpointing."""
    frozen_towers(model)
    model.enable_input_require_grads()


def _image_alone(model: nn.Module) -> list[tuple[Make, Make]]:
    return [(image, text), (text, images)]


def two_forwards_before_backward(rank: int, world: int) -> None:
    """The backward of the second takes the towers away, and that of the first gathers them."""
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    apply_ep_fsdp2(model, ep_size=2)
    everyone = [[image(stock, 1), text(stock, 2)], [text(stock, 3), images(stock, 4)]]
    losses = [loss_of(model, batches[rank]) for batches in everyone]
    for loss in reversed(losses):
        (loss * world).backward()
    for batches in everyone:
        for one in batches:
            loss_of(stock, one).backward()
    assert all(parameter.grad is not None for parameter in stock.parameters())
    assert_same_gradients("two forwards", model, stock, partial(budget, "deepseek_v3"))


def towers_are_whole_only_while_they_are_needed(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    given = [make(model, 3) for make in (text, (image, text)[rank])]
    apply_ep_fsdp2(model, ep_size=2)
    units = [model.get_submodule(name) for name in ("model.vision_tower", "model.mm_projector")]
    whole: list[list[bool]] = []

    def look(module: nn.Module, args: Any) -> None:
        whole.append([is_gathered(unit) for unit in units])

    model.model.language_model.layers[0].register_forward_pre_hook(look)
    for one in given:
        loss_of(model, one).backward()
        with torch.no_grad():
            loss_of(model, one)
        whole.append([is_gathered(unit) for unit in units])
    assert whole == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2] * 2


def a_tower_called_on_its_own_is_refused(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    given = image(model, 1)
    apply_ep_fsdp2(model, ep_size=2)
    with pytest.raises(ValueError, match="Kimi_K25VisionModel of a sharded model was called on"):
        model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])


def towers_that_nobody_found_refuse_ranks_that_differ(rank: int, world: int) -> None:
    """On every rank, in training and in `generate`; ranks that are alike equal stock."""
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    patch(model, ep_size=2, plan=replace(derive_plan(model), encoders=()))
    apply_ep_fsdp2(model)
    unlike = (image if rank == 1 else text)(stock, 5)
    says = "some ranks were given .*pixel_values and others were not"
    with pytest.raises(ValueError, match=says):
        model(**unlike)
    del unlike["labels"]
    with pytest.raises(ValueError, match=says):
        model.generate(**unlike, max_new_tokens=2)
    everyone = [images(stock, 1), image(stock, 2)]
    (loss_of(model, everyone[rank]) * world).backward()
    for one in everyone:
        loss_of(stock, one).backward()
    assert all(parameter.grad is not None for parameter in stock.parameters())
    assert_same_gradients("ranks alike", model, stock, partial(budget, "deepseek_v3"))
    given = {name: x for name, x in everyone[rank].items() if name != "labels"}
    options = {"max_new_tokens": 3 + rank, "do_sample": False}
    assert torch.equal(model.generate(**given, **options), stock.generate(**given, **options))


ON_TWO_RANKS = [
    two_forwards_before_backward,
    towers_are_whole_only_while_they_are_needed,
    a_tower_called_on_its_own_is_refused,
    towers_that_nobody_found_refuse_ranks_that_differ,
]
WAYS = {
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "frozen towers": frozen_towers,
    "input gradients": with_input_gradients,
}
WITHOUT_TEXT = {
    "frozen text": frozen_text,
    "projector alone": frozen_towers_before_a_trained_projector,
}


def _checks() -> list[Any]:
    found = {name: partial(_any_mix, name) for name in (*TYPES, *COMPOSITES)}
    every_way = ("kimi_k25", "qwen3_omni_moe_thinker", "ernie4_5_vl_moe", "gemma4")
    for name in every_way:
        for way, prepare in WAYS.items():
            found[f"{name}: {way}"] = partial(_any_mix, name, prepare=prepare, data=mixes)
        for way, prepare in WITHOUT_TEXT.items():
            found[f"{name}: {way}"] = partial(_any_mix, name, prepare=prepare, data=_image_alone)
    found["kimi_k25: FSDP2 alone"] = partial(_any_mix, "kimi_k25", ep_size=1)
    return [
        Check(name, 2, run, slow=name != "kimi_k25", timeout=120.0).as_parameter()
        for name, run in found.items()
    ]


def _any_mix(name: str, rank: int, world: int, **options: Any) -> None:
    if options or name not in MODEL_TYPES:
        assert_equals_stock(name, rank, world, **options)
        return
    with recording(name, "vision") as errors:
        errors += assert_equals_stock(name, rank, world)


@pytest.mark.parametrize("claim", _checks())
def test_any_mix_over_ranks_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(2, *ON_TWO_RANKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_sequence_parallelism_is_refused_with_such_towers() -> None:
    with pytest.raises(ValueError, match=r"sp_size \(2\) > 1"):
        patch(build("kimi_k25"), sp_size=2)
