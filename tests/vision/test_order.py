"""Ranks with different kinds of input reduce the gradients of their towers in the same order.

FSDP2 reduces one unit after the other, and a rank skips units without gradients. If one rank has
sound and another rank has pictures, both ranks therefore need gradients for both towers. With
reentrant checkpointing, the graph before backward does not show which parameters a tower will use.
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
    MakeBatch,
    build,
    list_encoder_names,
    make_image,
    make_images,
    make_sound,
    make_sound_and_image,
    make_text,
)
from support.architectures.pictures import takes_sound
from support.checks import Check, Found
from support.parity import checkpointing
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.upstream.graph import find_reached_parameters

STEPS: list[tuple[MakeBatch, MakeBatch]] = [
    (make_sound, make_image),
    (make_image, make_sound),
    (make_sound_and_image, make_text),
    (make_text, make_sound),
    (make_images, make_sound_and_image),
]


class RecordReduceScatter:
    """Replaces a unit's reduce-scatter. It records name and size, and sends nothing."""

    def __init__(self, name: str, records: list[tuple[str, int]]) -> None:
        self.name, self.records = name, records

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        self.records.append((self.name, input_tensor.numel()))


def leave_uncheckpointed(model: nn.Module) -> None:
    """Change nothing: every node of a tower is in the graph."""


def checkpoint_behind_a_function(model: Any) -> None:
    """Checkpoint a lambda, which does not show which module it runs, unlike a bound method."""
    checkpointing(model, use_reentrant=True)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _checkpoint


def _checkpoint(run: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(lambda *inputs: run(*inputs), *args, use_reentrant=True)


CHECKPOINTING: dict[str, Callable[[Any], None]] = {
    "no checkpoint": leave_uncheckpointed,
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "reentrant function": checkpoint_behind_a_function,
}


def towers_are_reduced_in_one_order(name: str, mode: str, rank: int, world: int) -> None:
    model = build(name)
    CHECKPOINTING[mode](model)
    _assert_one_order(model, rank, STEPS, unused=mode != "reentrant function")


def fewer_layers_than_features(name: str, mode: str, rank: int, world: int) -> None:
    """The tower has features for two layers, but the decoder has only one layer to use them."""
    options = {"num_hidden_layers": 1, "mlp_only_layers": [], "output_router_logits": False}
    model = tiny(name, **options)
    CHECKPOINTING[mode](model)
    steps = STEPS if takes_sound(model) else [(make_image, make_text), (make_text, make_images)]
    _assert_one_order(model, rank, steps, unused=False)


def _assert_one_order(
    model: Any, rank: int, steps: list[tuple[MakeBatch, MakeBatch]], *, unused: bool
) -> None:
    """Compare the order and the sizes of reduced units over ranks.

    With `unused`, a tower that no rank used must have no gradient, because weight decay would
    otherwise change it.
    """
    # FSDP2 warns of views among a module's outputs. Nothing modifies these views in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    towers = list_encoder_names(model)
    everyone = [
        [make(model, 10 * step + i) for i, make in enumerate(makes)]
        for step, makes in enumerate(steps)
    ]
    apply_ep_fsdp2(model, ep_size=2)
    records: list[tuple[str, int]] = []
    for unit, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RecordReduceScatter(unit, records))
    for makes, batches in zip(steps, everyone, strict=True):
        records.clear()
        loss_of(model, batches[rank]).backward()
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, records)
        inputs = " and ".join(make.__name__ for make in makes)
        assert orders[0] == orders[1], f"{inputs}: {orders[0]} and {orders[1]}"
        reduced = [unit for unit, _ in records if unit in towers]
        assert reduced, f"{inputs}: no tower in {records}"
        if unused:
            assert (len(reduced) < len(towers)) == (makes == (make_text, make_sound)), (
                f"{inputs}: {reduced}"
            )
        model.zero_grad()


WITH_SOUND = ("qwen3_omni_moe_thinker", "muse_spark", "inkling_mm_model", "dots3_note")
WITH_FEATURES = ("qwen3_omni_moe_thinker", "qwen3_vl_moe")
CHECKS = [
    Check(f"{name}, {what}: {mode}", 2, partial(run, name, mode), slow=True)
    for run, what, names in (
        (towers_are_reduced_in_one_order, "every tower", WITH_SOUND),
        (fewer_layers_than_features, "fewer layers", WITH_FEATURES),
    )
    for name in names
    for mode in CHECKPOINTING
]


@pytest.mark.slow
@pytest.mark.parametrize("claim", [check.as_parameter() for check in CHECKS])
def test_ranks_reduce_towers_in_one_order(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


class Tower(nn.Module):
    """A module with two layers that run, and one layer that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.second(self.first(x_BH))


def _run_checkpointed(run: Any, x_BH: Tensor) -> Tensor:
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
def test_a_reentrant_checkpoint_hides_the_parameters_of_its_modules(run: Any, hides: str) -> None:
    """All parameters of its modules count as hidden, or all candidates if its modules are unknown.

    The graph before backward does not show which parameters a reentrant checkpoint will use.
    """
    tower, other, before = Tower(), Tower(), nn.Linear(3, 3)
    out_BH = _run_checkpointed(run(tower), before(torch.ones(2, 3)))
    candidates = [*before.parameters(), *tower.parameters(), *other.parameters()]
    reached, hidden = find_reached_parameters([out_BH], candidates)
    assert reached == {id(parameter) for parameter in before.parameters()}
    hidden_towers = [tower] if hides == "one tower" else [tower, other]
    assert hidden == {id(parameter) for t in hidden_towers for parameter in t.parameters()}


def test_without_reentrant_checkpoints_nothing_is_hidden() -> None:
    tower = Tower()
    out_BH = checkpoint(tower, torch.ones(2, 3), use_reentrant=False)
    reached, hidden = find_reached_parameters([out_BH], tower.parameters())
    used = [*tower.first.parameters(), *tower.second.parameters()]
    assert (reached, hidden) == ({id(parameter) for parameter in used}, set())
