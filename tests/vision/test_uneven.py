"""Ranks that have very different things to see, over several micro-batches: equal to stock.

Two rounds of three micro-batches: other counts and sizes of pictures on every rank, gradients given
away behind the last one alone, which is one of text in the second round.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.inputs import loss_of
from support.architectures.mixes import Batch, Make, build, image, images, parts, text, video
from support.architectures.pictures import mixed_batch
from support.architectures.precision import budget
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from support.parity import assert_same_gradients, checkpointing, full_tensor
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks.collectives import sum_over_ranks

Prepare = Callable[[nn.Module], None]


def many(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [3, 1], text=3, seed=seed)


ROUNDS: list[list[tuple[Make, ...]]] = [
    [(images, text, many, video), (text, image, text, text), (image, many, images, text)],
    [(many, image, text, text), (text, images, image, text), (text, text, text, text)],
]


def as_it_is(model: nn.Module) -> None:
    """Every parameter is trained, in fp64."""


def frozen_tower(model: nn.Module) -> None:
    for name in parts(model):
        model.get_submodule(name).requires_grad_(False)


def tower_in_fp32(model: nn.Module) -> None:
    for name in parts(model):
        model.get_submodule(name).float()


def frozen_tower_in_fp32(model: nn.Module) -> None:
    frozen_tower(model)
    tower_in_fp32(model)


def adds_up(name: str, rank: int, world: int, prepare: Prepare = as_it_is, **config: Any) -> None:
    model, stock = build(name, seed=rank), build(name)
    for one in (model, stock):
        prepare(one)
    apply_ep_fsdp2(model, **({"ep_size": 2} | config))
    for number, micro_batches in enumerate(ROUNDS):
        losses = []
        for step, makes in enumerate(micro_batches):
            model.set_requires_gradient_sync(step == len(micro_batches) - 1)
            everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes[:world])]
            loss = loss_of(model, everyone[rank])
            (loss * world).backward()
            want = torch.stack([loss_of(stock, one) for one in everyone]).sum()
            want.backward()
            losses.append((sum_over_ranks(loss), want))
        for got, want in losses:  # of fp32, in the order of the ranks
            assert_close(f"{name}, round {number}: loss", got, want, FP32_INSIDE)
        fp32 = FP32_INSIDE if "fp32" in getattr(prepare, "__name__", "") else 0.0
        where = f"round {number}"
        assert_same_gradients(where, model, stock, lambda k: max(10 * fp32, budget(name, k)))  # noqa: B023
        for one in (model, stock):
            one.zero_grad()


def pictures_without_a_label(name: str, rank: int, world: int) -> None:
    """Rank 1 alone has pictures, and nothing of it counts: its tower gets zeros."""
    model, stock = build(name, seed=rank), build(name)
    apply_ep_fsdp2(model, ep_size=2)
    everyone = [text(stock, 1), images(stock, 2)]
    everyone[1]["labels"] = torch.full_like(everyone[1]["labels"], -100)
    num_tokens = everyone[0]["labels"][:, 1:].ne(-100).sum()
    loss = model(**everyone[rank], num_items_in_batch=num_tokens).loss
    (loss * world).backward()
    want = sum(stock(**one, num_items_in_batch=num_tokens).loss for one in everyone)
    want.backward()
    assert_close("loss", sum_over_ranks(loss), want, budget(name))
    _assert_same_grads(name, model, stock)


def _assert_same_grads(name: str, model: nn.Module, stock: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for key, parameter in stock.named_parameters():
        grad = full_tensor(ours[key].grad)
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = torch.zeros_like(parameter) if grad is None else grad
        assert_close(f"grad of {key}", grad, want, budget(name, key))


def low_precision_in_front_of_generate(name: str, rank: int, world: int) -> None:
    """Pixels in fp32, a model of fp32 that computes in bf16: the first token is the forward's."""
    model = build(name, seed=rank)
    given = {key: x for key, x in (text, image)[rank](model, 5).items() if key != "labels"}
    given = {key: x.float() if x.is_floating_point() else x for key, x in given.items()}
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_ep_fsdp2(model.eval(), ep_size=2, mp_policy=policy)
    got = model.generate(**given, max_new_tokens=1, do_sample=False)
    with torch.no_grad():
        want = model(**given).logits[:, -1].argmax(-1)
    assert torch.equal(got[:, -1], want), f"{got[:, -1]}, want {want}"


PREPARED: dict[str, Prepare] = {
    "as it is": as_it_is,
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "frozen tower": frozen_tower,
    "tower in fp32": tower_in_fp32,
    "frozen tower in fp32": frozen_tower_in_fp32,
}
THREE = ("qwen3_vl_moe", "kimi_k25", "ernie4_5_vl_moe")
DO_NOT_CAST = ("aria", "deepseek_ocr2", "inkling_mm_model")


def _checks() -> list[Any]:
    found: list[tuple[str, int, Callable[..., None]]] = [
        (f"{name}: {way}", 2, partial(adds_up, name, prepare=prepare))
        for name in THREE
        for way, prepare in PREPARED.items()
        if name != "kimi_k25" or "fp32" not in way  # its tower takes pixels of its own dtype alone
    ]
    found += [
        (f"{name}: pictures without a label", 2, partial(pictures_without_a_label, name))
        for name in THREE
    ]
    found += [
        (f"{name}: low precision", 2, partial(low_precision_in_front_of_generate, name))
        for name in (*THREE, *DO_NOT_CAST)
    ]
    found.append(("HSDP", 4, partial(adds_up, "kimi_k25", dp_replicate_size=2)))
    return [
        Check(name, world, run, slow=True, timeout=120.0).as_parameter()
        for name, world, run in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("claim", _checks())
def test_uneven_ranks_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
