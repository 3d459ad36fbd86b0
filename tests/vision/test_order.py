"""Ranks reduce the gradients of their towers in one order, whatever inputs each of them has.

FSDP2 reduces unit by unit and skips units in which a rank has no gradient. So if one rank has sound
and another one pictures, both must have gradients of both towers. Under reentrant checkpointing the
code before the backward cannot see what a tower is about to use.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures import tiny
from support.architectures.inputs import loss_of
from support.architectures.mixes import (
    Make,
    build,
    image,
    images,
    parts,
    sound,
    sound_and_image,
    text,
)
from support.architectures.pictures import takes_sound
from support.checks import Check, Found
from support.parity import checkpointing
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.upstream.graph import reached_parameters

STEPS: list[tuple[Make, Make]] = [
    (sound, image),
    (image, sound),
    (sound_and_image, text),
    (text, sound),
    (images, sound_and_image),
]


class Note:
    """Replace a unit's reduce-scatter: note the unit's name and wait for no rank."""

    def __init__(self, name: str, noted: list[tuple[str, int]]) -> None:
        self.name, self.noted = name, noted

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self.noted.append((self.name, input_tensor.numel()))


def not_checkpointed(model: nn.Module) -> None:
    """Every node of a tower is in the graph."""


def checkpointed_behind_a_function(model: Any) -> None:
    """A user's own checkpointing may hide which module it runs."""
    checkpointing(model, use_reentrant=True)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _checkpoint


def _checkpoint(run: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(lambda *given: run(*given), *args, use_reentrant=True)


WAYS: dict[str, Callable[[Any], None]] = {
    "no checkpoint": not_checkpointed,
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "reentrant function": checkpointed_behind_a_function,
}


def one_order(name: str, way: str, rank: int, world: int) -> None:
    model = build(name)
    WAYS[way](model)
    _assert_one_order(model, rank, STEPS, unused=way != "reentrant function")


def fewer_layers_than_features(name: str, way: str, rank: int, world: int) -> None:
    """The tower has features for two layers and the decoder has one layer. No rank waits."""
    options = {"num_hidden_layers": 1, "mlp_only_layers": [], "output_router_logits": False}
    model = tiny(name, **options)
    WAYS[way](model)
    steps = STEPS if takes_sound(model) else [(image, text), (text, images)]
    _assert_one_order(model, rank, steps, unused=False)


def _assert_one_order(
    model: Any, rank: int, steps: list[tuple[Make, Make]], *, unused: bool
) -> None:
    """Compare over ranks which units are reduced, in which order, and how much of each. With
    `unused`, an unused tower must have no gradient, because weight decay would move it.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # views: nobody writes them
    towers = parts(model)
    everyone = [
        [make(model, 10 * step + i) for i, make in enumerate(makes)]
        for step, makes in enumerate(steps)
    ]
    apply_ep_fsdp2(model, ep_size=2)
    noted: list[tuple[str, int]] = []
    for unit, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(Note(unit, noted))
    for makes, batches in zip(steps, everyone, strict=True):
        noted.clear()
        loss_of(model, batches[rank]).backward()
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, noted)
        said = " and ".join(make.__name__ for make in makes)
        assert orders[0] == orders[1], f"{said}: {orders[0]} and {orders[1]}"
        reduced = [unit for unit, _ in noted if unit in towers]
        assert reduced, f"{said}: no tower in {noted}"
        if unused:
            assert (len(reduced) < len(towers)) == (makes == (text, sound)), f"{said}: {reduced}"
        model.zero_grad()


WITH_SOUND = ("qwen3_omni_moe_thinker", "muse_spark", "inkling_mm_model", "dots3_note")
WITH_FEATURES = ("qwen3_omni_moe_thinker", "qwen3_vl_moe")
CHECKS = [
    Check(f"{name}, {what}: {way}", 2, partial(run, name, way), slow=True)
    for run, what, names in (
        (one_order, "every tower", WITH_SOUND),
        (fewer_layers_than_features, "fewer layers", WITH_FEATURES),
    )
    for name in names
    for way in WAYS
]


@pytest.mark.slow
@pytest.mark.parametrize("claim", [check.as_parameter() for check in CHECKS])
def test_ranks_reduce_towers_in_one_order(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


class Tower(nn.Module):
    """Two layers that run, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.second(self.first(x_BH))


def _hide(run: Any, x_BH: Tensor) -> Tensor:
    return checkpoint(run, x_BH, use_reentrant=True)


@pytest.mark.parametrize(
    ("run", "hides"),
    [
        (lambda tower: tower, "one tower"),
        (lambda tower: tower.forward, "one tower"),
        (lambda tower: partial(tower.forward), "one tower"),
        (lambda tower: partial(Tower.forward, tower), "one tower"),
        (lambda tower: lambda x_BH: tower(x_BH), "anything"),
    ],
    ids=["module", "method", "partial of a method", "partial of a function", "function"],
)
def test_a_reentrant_checkpoint_may_use_what_its_modules_hold(run: Any, hides: str) -> None:
    """Neither a tower of the module nor a tensor of the graph is hidden from it."""
    tower, other, before = Tower(), Tower(), nn.Linear(3, 3)
    out_BH = _hide(run(tower), before(torch.ones(2, 3)))
    everything = [*before.parameters(), *tower.parameters(), *other.parameters()]
    reached, hidden = reached_parameters([out_BH], everything)
    assert reached == {id(parameter) for parameter in before.parameters()}
    held = [tower] if hides == "one tower" else [tower, other]
    assert hidden == {id(parameter) for one in held for parameter in one.parameters()}


def test_without_reentrant_checkpoints_nothing_is_hidden() -> None:
    tower = Tower()
    out_BH = checkpoint(tower, torch.ones(2, 3), use_reentrant=False)
    reached, hidden = reached_parameters([out_BH], tower.parameters())
    used = [*tower.first.parameters(), *tower.second.parameters()]
    assert (reached, hidden) == ({id(parameter) for parameter in used}, set())
