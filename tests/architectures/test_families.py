"""Models of eight families train, resume and generate on several ranks as stock does.

The models are whole, with their towers, in fp64. Three comparisons are made:

- two steps on 4 ranks (ep 2, ep_fsdp or HSDP, gradient checkpointing) with stock in one process;
- a run that resumes at another layout with a run that did not stop;
- the text that stock generates from the saved files with the text of the trained model.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import FAMILIES, batch, mixed_batch, model_class, recording
from support.architectures.parts import parts_of
from support.architectures.pictures import takes_pictures
from support.architectures.steps import (
    BATCHED,
    adamw,
    assert_same_step,
    batches,
    build,
    count_tokens,
    loss_of_sum,
    start_run,
)
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.generation import assert_same, continuations
from support.jobs.resume import PARTS, assert_equal, everything, step
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, load_checkpoint, save_checkpoint, save_pretrained

# Options of `apply_ep_fsdp2`, and use_reentrant of gradient checkpointing.
LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "ep 2, ep_fsdp 2": ({"ep_size": 2}, False),
    "ep 2, HSDP": ({"ep_size": 2, "dp_replicate_size": 2}, True),
}
NUM_STEPS = 2
# The number of pictures in each row of the four parts of a global batch.
PICTURES = [[1], [0, 0], [0, 1], [0]]


def _run_two_steps(model_type: str, layout: str, rank: int, world: int) -> None:
    sizes, use_reentrant = LAYOUTS[layout]
    model, stock = build(model_type, seed=rank), build(model_type)
    experts = list(parts_of(model).experts.values())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    apply_ep_fsdp2(model, **sizes)
    calls: list[int] = []
    for module in experts:
        module.register_forward_pre_hook(lambda *_: calls.append(0))
    optimizers = adamw(model), adamw(stock)
    for number in range(NUM_STEPS):
        where = f"{model_type}, {layout}, step {number}"
        assert_same_step(where, (model, stock), optimizers, seed=10 * number)
    assert len(calls) == 2 * NUM_STEPS * len(experts), "each layer is recomputed once"


CHECKPOINTED = [
    Check(f"{name}, {layout}", 4, partial(_run_two_steps, name, layout), slow=True).as_parameter()
    for name in FAMILIES
    for layout in LAYOUTS
]


@pytest.mark.parametrize("claim", CHECKPOINTED)
def test_two_checkpointed_steps_on_four_ranks_equal_stock(found: Found, claim: Check) -> None:
    """With both kinds of checkpointing, a recomputed layer dispatches the same rows."""
    found.raise_if_failed(claim)


def _build_parts(stock: nn.Module, number: int) -> list[dict[str, Tensor]]:
    """Build the four parts of a global batch, which are divided among the data ranks."""
    seeds = range(100 * number, 100 * number + PARTS)
    if takes_pictures(stock):
        pairs = zip(PICTURES, seeds, strict=True)
        return [mixed_batch(stock, pictures, seed=seed) for pictures, seed in pairs]
    return [batch(stock, 1 + seed % 2, 6 + 2 * (seed % PARTS), seed=seed) for seed in seeds]


def _resume(model_type: str, rank: int, world: int, folder: str) -> None:
    stock = build(model_type)
    global_batches = [_build_parts(stock, number) for number in range(NUM_STEPS + 1)]
    run = start_run(model_type, rank, ep_size=2, dp_replicate_size=2)
    for number in range(NUM_STEPS):
        step(run, number, global_batches[number])
    save_checkpoint(folder, run.model, run.optimizer, run.scheduler)
    saved = everything(run)
    step(run, NUM_STEPS, global_batches[NUM_STEPS])
    uninterrupted = everything(run)
    with recording(model_type, "resume") as errors:
        for sizes in ({"ep_size": 4}, {"ep_size": 1}):
            where = f"{model_type}, {sizes}"
            resumed = start_run(model_type, 7 + rank, **sizes)
            load_checkpoint(folder, resumed.model, resumed.optimizer, resumed.scheduler)
            assert_equal(where, everything(resumed), saved)
            step(resumed, NUM_STEPS, global_batches[NUM_STEPS])
            errors += _assert_close(where, everything(resumed), uninterrupted)


def _assert_close(where: str, actual: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    assert actual.keys() == expected.keys(), where
    return [
        assert_close(f"{where}: next step: {name}", actual[name], value, FP64_MODEL)
        for name, value in expected.items()
        if isinstance(value, Tensor)
    ]


RESUMED = [
    Check(f"{name} goes on", 4, partial(_resume, name), slow=True).as_parameter()
    for name in FAMILIES
]


@pytest.mark.parametrize("claim", RESUMED)
def test_a_run_resumes_at_another_layout(found: Found, claim: Check) -> None:
    """A state saved at ep 2 with HSDP is loaded bit by bit at ep 4 and ep 1.

    The next step equals the step of the run that did not stop.
    """
    found.raise_if_failed(claim)


def _generate(model_type: str, rank: int, world: int, folder: str) -> None:
    model = build(model_type, seed=rank)
    apply_ep_fsdp2(model, ep_size=2)
    everyone = batches(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    loss = loss_of_sum(model, everyone[rank], count_tokens(everyone))
    (loss * world).backward()
    optimizer.step()
    save_pretrained(model, folder)
    prompts = batch(model, 2, 4 + 3 * rank, seed=50 + rank)
    del prompts["labels"]
    actual = continuations(model, rank, prompts)
    implementation = "batched_mm" if model_type in BATCHED else "eager"
    options: Any = {"dtype": torch.float64, "experts_implementation": implementation}
    stock = model_class(model_type).from_pretrained(folder, **options)
    assert_same(model_type, actual, continuations(stock, rank, prompts))
    untrained = continuations(build(model_type), rank, prompts)
    assert not torch.equal(untrained["free"], actual["free"]), f"{model_type} has learnt nothing"


GENERATE = [
    Check(f"{name} generates", 2, partial(_generate, name), slow=True).as_parameter()
    for name in FAMILIES
]


@pytest.mark.parametrize("claim", GENERATE)
def test_stock_generates_the_text_of_the_trained_model(found: Found, claim: Check) -> None:
    """Stock loads the saved hub files. Each rank has other prompts of another length."""
    found.raise_if_failed(claim)
