"""If only one rank has pictures, `generate` and evaluation return stock's results on every rank.

Each rank also asks for another number of new tokens. A rank that has all its tokens continues with
forwards until the other rank has finished.
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
    MakeBatch,
    build,
    make_image,
    make_image_and_video,
    make_images,
    make_sound,
    make_sound_and_image,
    make_text,
    make_video,
)
from support.architectures.pictures import takes_pictures, takes_sound
from support.architectures.precision import budget
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from support.fp64 import FP64
from support.needs import TOWER_IN_BLOCKS
from support.parity import assert_same_gradients
from torch import nn

from hf_moe_ep import apply_ep_fsdp2

# generate() of this type is another loop, which calls some modules of the model directly. It does
# not run on a sharded model (docs/limits.md).
OWN_LOOP = {"diffusion_gemma"}
# Stock's beam search does not repeat the pictures of this type. Without TOWER_IN_BLOCKS it repeats
# the pictures of no type.
NO_BEAMS = {"llama4"}


def make_without_labels(make: MakeBatch, model: nn.Module, seed: int) -> Batch:
    return {name: x for name, x in make(model, seed).items() if name != "labels"}


def build_sharded_and_stock(name: str, rank: int) -> tuple[Any, Any]:
    """Build a sharded model and a stock model of type `name`, both in evaluation mode."""
    model, stock = build(name, seed=rank), build(name)
    apply_ep_fsdp2(model, ep_size=2)
    return model.eval(), stock.eval()


def assert_generates(model: Any, stock: Any, inputs: Batch, rank: int, **options: Any) -> None:
    options = {"max_new_tokens": 2 + 2 * rank, "do_sample": False} | options
    got = model.generate(**inputs, **options)
    want = stock.generate(**inputs, **options)
    assert torch.equal(got, want), f"{options}: {got.tolist()}, want {want.tolist()}"


def a_picture_on_rank_1(name: str, rank: int, world: int) -> None:
    """generate() is the first call of the model. The second call uses beam search.

    Rank 1 has sound if the model takes no pictures.
    """
    with FP64():
        model, stock = build_sharded_and_stock(name, rank)
        encoded = make_image if takes_pictures(stock) else make_sound
        inputs = make_without_labels((make_text, encoded)[rank], stock, 5)
        assert_generates(model, stock, inputs, rank)
        if TOWER_IN_BLOCKS and name not in NO_BEAMS:
            assert_generates(model, stock, inputs, rank, num_beams=2, num_return_sequences=2)


def without_a_cache(name: str, rank: int, world: int) -> None:
    """Every forward gets the whole prompt with its pictures."""
    model, stock = build_sharded_and_stock(name, rank)
    inputs = make_without_labels((make_text, make_image)[rank], stock, 5)
    assert_generates(model, stock, inputs, rank, use_cache=False)


def every_kind_of_input(name: str, rank: int, world: int) -> None:
    """Ranks have images and videos, then both in one prompt, then sound if the model takes it."""
    model, stock = build_sharded_and_stock(name, rank)
    makes = [(make_video, make_images), (make_image_and_video, make_text)]
    if takes_sound(stock):
        makes.append((make_text, make_sound_and_image))
    for seed, by_rank in enumerate(makes):
        assert_generates(model, stock, make_without_labels(by_rank[rank], stock, seed), rank)


def between_steps_of_training(name: str, rank: int, world: int) -> None:
    """Forwards without a backward, with or without a graph, do not change later gradients."""
    model, stock = build_sharded_and_stock(name, rank)
    by_rank: tuple[MakeBatch, MakeBatch] = (make_images, make_text)
    for seed, guard in enumerate((torch.no_grad, torch.enable_grad, torch.inference_mode)):
        inputs = make_without_labels(by_rank[rank], stock, seed)
        with guard():
            got, want = model(**inputs).logits, stock(**inputs).logits
        assert_close(f"{guard.__name__}: logits", got, want, 10 * FP32_INSIDE)
    everyone = [make(stock, 7 + i) for i, make in enumerate((make_text, make_image))]
    (loss_of(model.train(), everyone[rank]) * world).backward()
    assert_generates(model.eval(), stock, make_without_labels(by_rank[rank], stock, 9), rank)
    for x in everyone:
        loss_of(stock.train(), x).backward()
    assert_same_gradients(name, model, stock, lambda key: max(budget(name, key), FP32_INSIDE))


def pictures_that_do_not_fit_their_grid_stop_every_rank(rank: int, world: int) -> None:
    model, stock = build_sharded_and_stock("qwen3_vl_moe", rank)
    inputs = make_without_labels((make_text, make_image)[rank], stock, 5)
    if rank == 1:
        inputs["pixel_values"] = inputs["pixel_values"][:-1]
    message = "has 8 patches, pixel_values has 7 rows" if rank == 1 else "another rank's images"
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, max_new_tokens=2)


FAST = "a_picture_on_rank_1: qwen3_vl_moe"
TYPES_OF_ALL_INPUTS = (
    "qwen3_vl_moe",
    "kimi_k25",
    "ernie4_5_vl_moe",
    "qwen3_omni_moe_thinker",
    "muse_spark",
)
RUNS: dict[Callable[..., None], tuple[str, ...]] = {
    a_picture_on_rank_1: (*(name for name in TYPES if name not in OWN_LOOP), *COMPOSITES),
    without_a_cache: ("qwen3_vl_moe", "kimi_k25"),
    every_kind_of_input: TYPES_OF_ALL_INPUTS,
    between_steps_of_training: TYPES_OF_ALL_INPUTS,
}


def _list_checks() -> list[Any]:
    runs: dict[str, Callable[..., None]] = {
        f"{run.__name__}: {name}": partial(run, name)
        for run, names in RUNS.items()
        for name in names
    }
    runs["pictures that do not fit their grid"] = (
        pictures_that_do_not_fit_their_grid_stop_every_rank
    )
    return [
        Check(name, 2, run, slow=name != FAST, timeout=120.0).as_parameter()
        for name, run in runs.items()
    ]


@pytest.mark.parametrize("claim", _list_checks())
def test_ranks_with_different_prompts_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
