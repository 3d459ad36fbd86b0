"""Every MoE type with pictures or sound equals stock in one process.

The two ranks get all mixes of text, pictures and sound. A tiny fp64 model of each type runs all
mixes, with experts split over the ranks (`support.architectures.precision` lists what stock
computes in fp32). A gradient that is None in stock must also be None in the patched model, so that
weight decay does not change unused towers.
"""

import copy
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
    MakeBatch,
    build,
    freeze_encoders,
    list_encoder_names,
    list_mixes,
    make_image,
    make_images,
    make_text,
)
from support.architectures.precision import budget
from support.architectures.steps import exactly
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import assert_same_gradients, checkpointing, full_tensor
from torch import nn

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.derive import derive_plan
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.sharded_models import is_gathered
from hf_moe_ep.vision.encoders import RecordGraph


def assert_equals_stock(
    name: str,
    rank: int,
    world: int,
    *,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    data: Callable[[nn.Module], list[tuple[MakeBatch, MakeBatch]]] = list_mixes,
    **config: Any,
) -> list[float]:
    """Compare losses and gradients of every mix with stock, and the weights after an SGD step."""
    with exactly(name):
        return _compare_steps(name, rank, world, prepare, data, config)


def _compare_steps(
    name: str,
    rank: int,
    world: int,
    prepare: Callable[[nn.Module], Any],
    data: Callable[[nn.Module], list[tuple[MakeBatch, MakeBatch]]],
    config: dict[str, Any],
) -> list[float]:
    # FSDP2 warns of views among a module's outputs. Nothing modifies these views in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    errors = []
    model, stock = build(name, seed=rank), build(name)
    for prepared in (model, stock):
        prepare(prepared)
    apply_ep_fsdp2(model, **({"ep_size": 2} | config))
    ours = dict(model.named_parameters())
    steps = data(stock)
    for step, makes in enumerate(steps):
        where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
        everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes)]
        loss = loss_of(model, everyone[rank])
        (loss * world).backward()
        want = torch.stack([loss_of(stock, x) for x in everyone]).sum()
        want.backward()
        errors.append(assert_close(f"{where}: loss", sum_over_ranks(loss), want, budget(name)))
        errors += assert_same_gradients(where, model, stock, partial(budget, name))
        if step < len(steps) - 1:
            model.zero_grad()
            stock.zero_grad()
    for trained in (model, stock):
        torch.optim.SGD(trained.parameters(), lr=0.01, weight_decay=0.1).step()
    for key, parameter in stock.named_parameters():
        got, limit = full_tensor(ours[key].detach()), budget(name, key)
        errors.append(assert_close(f"{name}: {key} after a step", got, parameter, limit))
    return errors


def freeze_all_but_the_projector(model: nn.Module) -> None:
    """Freeze all but the projector, as the first stage of many recipes does."""
    model.requires_grad_(False)
    *_, projector = list_encoder_names(model)
    model.get_submodule(projector).requires_grad_(True)


def freeze_text(model: nn.Module) -> None:
    names = list_encoder_names(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(names))


def require_input_gradients(model: Any) -> None:
    """Let inputs require gradients, as PEFT does for reentrant checkpointing."""
    freeze_encoders(model)
    model.enable_input_require_grads()


def _list_image_mixes(model: nn.Module) -> list[tuple[MakeBatch, MakeBatch]]:
    return [(make_image, make_text), (make_text, make_images)]


def two_forwards_before_backward(rank: int, world: int) -> None:
    """The second forward's backward reshards the towers; the first forward's gathers them again."""
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    apply_ep_fsdp2(model, ep_size=2)
    everyone = [
        [make_image(stock, 1), make_text(stock, 2)],
        [make_text(stock, 3), make_images(stock, 4)],
    ]
    losses = [loss_of(model, batches[rank]) for batches in everyone]
    for loss in reversed(losses):
        (loss * world).backward()
    for batches in everyone:
        for x in batches:
            loss_of(stock, x).backward()
    assert all(parameter.grad is not None for parameter in stock.parameters())
    assert_same_gradients("two forwards", model, stock, partial(budget, "deepseek_v3"))


def towers_are_gathered_only_while_they_are_needed(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    batches = [make(model, 3) for make in (make_text, (make_image, make_text)[rank])]
    apply_ep_fsdp2(model, ep_size=2)
    units = [model.get_submodule(name) for name in ("model.vision_tower", "model.mm_projector")]
    gathered: list[list[bool]] = []

    def record_gathered(module: nn.Module, args: Any) -> None:
        gathered.append([is_gathered(unit) for unit in units])

    model.model.language_model.layers[0].register_forward_pre_hook(record_gathered)
    for inputs in batches:
        loss_of(model, inputs).backward()
        with torch.no_grad():
            loss_of(model, inputs)
        gathered.append([is_gathered(unit) for unit in units])
    assert gathered == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2] * 2


def a_tower_called_on_its_own_is_refused(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    inputs = make_image(model, 1)
    apply_ep_fsdp2(model, ep_size=2)
    with pytest.raises(ValueError, match="Kimi_K25VisionModel of a sharded model was called on"):
        model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])


def undeclared_towers_refuse_ranks_that_differ(rank: int, world: int) -> None:
    """Without `encoders` in the plan, all ranks need the same kinds of input.

    Otherwise every rank raises an error, in training and in `generate`. Ranks with the same kinds
    equal stock.
    """
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    patch(model, ep_size=2, plan=replace(derive_plan(model), encoders=()))
    apply_ep_fsdp2(model)
    different = (make_image if rank == 1 else make_text)(stock, 5)
    message = "some ranks were given .*pixel_values and others were not"
    with pytest.raises(ValueError, match=message):
        model(**different)
    del different["labels"]
    with pytest.raises(ValueError, match=message):
        model.generate(**different, max_new_tokens=2)
    everyone = [make_images(stock, 1), make_image(stock, 2)]
    (loss_of(model, everyone[rank]) * world).backward()
    for x in everyone:
        loss_of(stock, x).backward()
    assert all(parameter.grad is not None for parameter in stock.parameters())
    assert_same_gradients("same kinds", model, stock, partial(budget, "deepseek_v3"))
    prompt = {name: x for name, x in everyone[rank].items() if name != "labels"}
    options = {"max_new_tokens": 3 + rank, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **options), stock.generate(**prompt, **options))


ON_TWO_RANKS = [
    two_forwards_before_backward,
    towers_are_gathered_only_while_they_are_needed,
    a_tower_called_on_its_own_is_refused,
    undeclared_towers_refuse_ranks_that_differ,
]
PREPARED = {
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "frozen towers": freeze_encoders,
    "input gradients": require_input_gradients,
}
WITHOUT_TEXT = {
    "frozen text": freeze_text,
    "projector alone": freeze_all_but_the_projector,
}


def _list_checks() -> list[Any]:
    runs = {name: partial(_compare_mixes, name) for name in (*TYPES, *COMPOSITES)}
    for name in ("kimi_k25", "qwen3_omni_moe_thinker", "ernie4_5_vl_moe", "gemma4"):
        for kind, prepare in PREPARED.items():
            runs[f"{name}: {kind}"] = partial(
                _compare_mixes, name, prepare=prepare, data=list_mixes
            )
        for kind, prepare in WITHOUT_TEXT.items():
            runs[f"{name}: {kind}"] = partial(
                _compare_mixes, name, prepare=prepare, data=_list_image_mixes
            )
    runs["kimi_k25: FSDP2 alone"] = partial(_compare_mixes, "kimi_k25", ep_size=1)
    return [
        Check(name, 2, run, slow=True, timeout=120.0).as_parameter() for name, run in runs.items()
    ]


def _compare_mixes(name: str, rank: int, world: int, **options: Any) -> None:
    if options or name not in MODEL_TYPES:
        assert_equals_stock(name, rank, world, **options)
        return
    with recording(name, "vision") as errors:
        errors += assert_equals_stock(name, rank, world)


@pytest.mark.parametrize("claim", _list_checks())
def test_any_mix_over_ranks_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(2, *ON_TWO_RANKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_sequence_parallelism_is_refused_with_gathered_towers() -> None:
    with pytest.raises(ValueError, match=r"sp_size \(2\) > 1"):
        patch(build("internvl"), sp_size=2)


def test_a_copied_module_belongs_to_the_model_of_its_original() -> None:
    """PEFT copies a projector that it trains (modules_to_save); the copy shares its hooks."""
    model = patch(build("kimi_k25"))
    (projector, hook), *_ = _list_recording_hooks(model)
    (_, hook_of_copy) = _list_recording_hooks(copy.deepcopy(projector))[0]
    assert hook_of_copy is hook and hook.encoders.state is find_state(model)
    copied = copy.deepcopy(model)
    assert all(h.encoders.state is find_state(copied) for _, h in _list_recording_hooks(copied))
    assert all(h.encoders.state is find_state(model) for _, h in _list_recording_hooks(model))


def _list_recording_hooks(model: nn.Module) -> list[tuple[nn.Module, RecordGraph]]:
    return [
        (module, hook)
        for module in model.modules()
        for hook in module._forward_hooks.values()
        if isinstance(hook, RecordGraph)
    ]
