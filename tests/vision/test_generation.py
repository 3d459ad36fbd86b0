"""`generate` and evaluation where one rank alone has pictures: each as stock, alone, does it.

Ranks want other numbers of new tokens, too: whoever has enough runs along until all have.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.inputs import loss_of
from support.architectures.mixes import (
    COMPOSITES,
    TYPES,
    Batch,
    Make,
    both,
    build,
    image,
    images,
    sound_and_image,
    text,
    video,
)
from support.architectures.pictures import takes_sound
from support.architectures.precision import budget
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from support.needs import TOWER_IN_BLOCKS
from support.parity import assert_same_gradients
from torch import nn

from hf_moe_ep import apply_ep_fsdp2


def prompt(make: Make, model: nn.Module, seed: int) -> Batch:
    return {name: x for name, x in make(model, seed).items() if name != "labels"}


def sharded(name: str, rank: int) -> tuple[Any, Any]:
    """A model of `name`, and stock; both evaluate."""
    model, stock = build(name, seed=rank), build(name)
    apply_ep_fsdp2(model, ep_size=2)
    return model.eval(), stock.eval()


def assert_generates(model: Any, stock: Any, given: Batch, rank: int, **options: Any) -> None:
    options = {"max_new_tokens": 2 + 2 * rank, "do_sample": False} | options
    got = model.generate(**given, **options)
    want = stock.generate(**given, **options)
    assert torch.equal(got, want), f"{options}: {got.tolist()}, want {want.tolist()}"


def a_picture_on_rank_1(name: str, rank: int, world: int) -> None:
    """Before any forward; then with beams."""
    model, stock = sharded(name, rank)
    given = prompt((text, image)[rank], stock, 5)
    assert_generates(model, stock, given, rank)
    if TOWER_IN_BLOCKS:  # in older ones beams lose count of the pictures, in stock as well
        assert_generates(model, stock, given, rank, num_beams=2, num_return_sequences=2)


def without_a_cache(name: str, rank: int, world: int) -> None:
    """Every forward has the whole prompt, and what the tower made of it."""
    model, stock = sharded(name, rank)
    given = prompt((text, image)[rank], stock, 5)
    assert_generates(model, stock, given, rank, use_cache=False)


def of_every_kind(name: str, rank: int, world: int) -> None:
    """Images and videos in different prompts, then both in one, and sound where a model has it."""
    model, stock = sharded(name, rank)
    makes = [(video, images), (both, text)]
    if takes_sound(stock):
        makes.append((text, sound_and_image))
    for seed, by_rank in enumerate(makes):
        assert_generates(model, stock, prompt(by_rank[rank], stock, seed), rank)


def between_steps_of_training(name: str, rank: int, world: int) -> None:
    """Forwards that no backward follows, with and without a graph, change no gradient behind."""
    model, stock = sharded(name, rank)
    by_rank: tuple[Make, Make] = (images, text)
    for seed, guard in enumerate((torch.no_grad, torch.enable_grad, torch.inference_mode)):
        given = prompt(by_rank[rank], stock, seed)
        with guard():
            got, want = model(**given).logits, stock(**given).logits
        assert_close(f"{guard.__name__}: logits", got, want, 10 * FP32_INSIDE)
    everyone = [make(stock, 7 + i) for i, make in enumerate((text, image))]
    (loss_of(model.train(), everyone[rank]) * world).backward()
    assert_generates(model.eval(), stock, prompt(by_rank[rank], stock, 9), rank)
    for one in everyone:
        loss_of(stock.train(), one).backward()
    assert_same_gradients(name, model, stock, lambda key: max(budget(name, key), FP32_INSIDE))


def pictures_that_fit_no_grid_stop_every_rank(rank: int, world: int) -> None:
    model, stock = sharded("qwen3_vl_moe", rank)
    given = prompt((text, image)[rank], stock, 5)
    if rank == 1:
        given["pixel_values"] = given["pixel_values"][:-1]
    says = "has 8 patches, pixel_values has 7 rows" if rank == 1 else "another rank's images"
    with pytest.raises(ValueError, match=says):
        model.generate(**given, max_new_tokens=2)


FAST = "a_picture_on_rank_1: qwen3_vl_moe"
EVERY_WAY = (
    "qwen3_vl_moe",
    "kimi_k25",
    "ernie4_5_vl_moe",
    "qwen3_omni_moe_thinker",
    "muse_spark",
)
RUNS: dict[Callable[..., None], tuple[str, ...]] = {
    a_picture_on_rank_1: (*TYPES, *COMPOSITES),
    without_a_cache: ("qwen3_vl_moe", "kimi_k25"),
    of_every_kind: EVERY_WAY,
    between_steps_of_training: EVERY_WAY,
}


def _checks() -> list[Any]:
    found: dict[str, Callable[..., None]] = {
        f"{run.__name__}: {name}": partial(run, name)
        for run, names in RUNS.items()
        for name in names
    }
    found["pictures that fit no grid"] = pictures_that_fit_no_grid_stop_every_rank
    return [
        Check(name, 2, run, slow=name != FAST, timeout=120.0).as_parameter()
        for name, run in found.items()
    ]


@pytest.mark.parametrize("claim", _checks())
def test_ranks_with_other_prompts_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
