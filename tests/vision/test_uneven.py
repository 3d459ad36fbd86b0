"""Gradient accumulation on ranks with different numbers and sizes of pictures equals stock.

Each of two rounds has three micro-batches, and FSDP2 reduces gradients only after the last
micro-batch. In the second round, the last micro-batch of all ranks is text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures.inputs import loss_of
from support.architectures.mixes import (
    Batch,
    MakeBatch,
    build,
    freeze_encoders,
    list_encoder_names,
    make_image,
    make_images,
    make_text,
    make_video,
)
from support.architectures.pictures import mixed_batch
from support.architectures.precision import budget
from support.checks import Check, Found
from support.close import FP32_INSIDE, assert_close
from support.parity import assert_same_gradients, checkpointing, full_tensor
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sharding.units import reshard

Prepare = Callable[[nn.Module], None]


def three_and_one(model: Any, seed: int) -> Batch:
    """Make two rows, the first with three pictures and the second with one picture."""
    return mixed_batch(model, [3, 1], text=3, seed=seed)


ROUNDS: list[list[tuple[MakeBatch, ...]]] = [
    [
        (make_images, make_text, three_and_one, make_video),
        (make_text, make_image, make_text, make_text),
        (make_image, three_and_one, make_images, make_text),
    ],
    [
        (three_and_one, make_image, make_text, make_text),
        (make_text, make_images, make_image, make_text),
        (make_text, make_text, make_text, make_text),
    ],
]


def leave_unchanged(model: nn.Module) -> None:
    """Leave the model leave_unchanged, so that every parameter is trained in fp64."""


def cast_tower_to_fp32(model: nn.Module) -> None:
    for name in list_encoder_names(model):
        model.get_submodule(name).float()


def freeze_and_cast_tower_to_fp32(model: nn.Module) -> None:
    freeze_encoders(model)
    cast_tower_to_fp32(model)


def accumulate_gradients(
    name: str, rank: int, world: int, prepare: Prepare = leave_unchanged, **config: Any
) -> None:
    model, stock = build(name, seed=rank), build(name)
    for prepared in (model, stock):
        prepare(prepared)
    apply_ep_fsdp2(model, **({"ep_size": 2} | config))
    for number, micro_batches in enumerate(ROUNDS):
        losses = []
        for step, makes in enumerate(micro_batches):
            model.set_requires_gradient_sync(step == len(micro_batches) - 1)
            everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes[:world])]
            loss = loss_of(model, everyone[rank])
            (loss * world).backward()
            want = torch.stack([loss_of(stock, x) for x in everyone]).sum()
            want.backward()
            losses.append((sum_over_ranks(loss), want))
        for got, want in losses:  # the losses are fp32 and summed in another order
            assert_close(f"{name}, round {number}: loss", got, want, FP32_INSIDE)
        fp32 = FP32_INSIDE if "fp32" in getattr(prepare, "__name__", "") else 0.0
        where = f"round {number}"
        assert_same_gradients(where, model, stock, lambda k: max(10 * fp32, budget(name, k)))  # noqa: B023
        model.zero_grad()
        stock.zero_grad()


def pictures_without_a_label(name: str, rank: int, world: int) -> None:
    """Only rank 1 has pictures, but all its labels are ignored, so tower gradients are zero."""
    model, stock = build(name, seed=rank), build(name)
    apply_ep_fsdp2(model, ep_size=2)
    everyone = [make_text(stock, 1), make_images(stock, 2)]
    everyone[1]["labels"] = torch.full_like(everyone[1]["labels"], -100)
    num_tokens = everyone[0]["labels"][:, 1:].ne(-100).sum()
    loss = model(**everyone[rank], num_items_in_batch=num_tokens).loss
    (loss * world).backward()
    want = sum(stock(**x, num_items_in_batch=num_tokens).loss for x in everyone)
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


def generate_in_low_precision(name: str, rank: int, world: int) -> None:
    """The first token that a model generates must have the largest logit of a forward.

    The fp32 model computes in bf16, and gets fp32 pixels.
    """
    model = build(name, seed=rank)
    inputs = {
        key: x for key, x in (make_text, make_image)[rank](model, 5).items() if key != "labels"
    }
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
    model.float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_ep_fsdp2(model.eval(), ep_size=2, mp_policy=policy)
    got = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    with torch.no_grad():
        want = model(**inputs).logits[:, -1].argmax(-1)
    assert torch.equal(got[:, -1], want), f"{got[:, -1]}, want {want}"


def encoders_after_a_skipped_backward(name: str, rank: int, world: int) -> None:
    """If a forward without backward leaves encoders gathered, their old weights are not used."""
    model = build(name, seed=rank)
    inputs = make_image(model, 2)
    apply_ep_fsdp2(model, ep_size=2)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    prompt = {key: x for key, x in inputs.items() if key != "labels"}
    for run in ("forward", "generate"):
        loss_of(model, inputs)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if run == "forward":
            got = loss_of(model, inputs)
            reshard(model)
            want = loss_of(model, inputs)
        else:
            options = {"return_dict_in_generate": True, "output_logits": True}
            with torch.no_grad():
                (got,) = model.generate(
                    **prompt, max_new_tokens=1, do_sample=False, **options
                ).logits
                reshard(model)
                want = model(**prompt).logits[:, -1]
        assert_close(run, got.double(), want.double(), 10 * FP32_INSIDE)  # generate casts to fp32


PREPARED: dict[str, Prepare] = {
    "as it is": leave_unchanged,
    "checkpoint": partial(checkpointing, use_reentrant=False),
    "reentrant": partial(checkpointing, use_reentrant=True),
    "frozen tower": freeze_encoders,
    "tower in fp32": cast_tower_to_fp32,
    "frozen tower in fp32": freeze_and_cast_tower_to_fp32,
}
FULLY_TESTED = ("qwen3_vl_moe", "kimi_k25", "ernie4_5_vl_moe")
DO_NOT_CAST = ("aria", "deepseek_ocr2", "inkling_mm_model")


def _list_checks() -> list[Any]:
    runs: list[tuple[str, int, Callable[..., None]]] = [
        (f"{name}: {kind}", 2, partial(accumulate_gradients, name, prepare=prepare))
        for name in FULLY_TESTED
        for kind, prepare in PREPARED.items()
        if name != "kimi_k25" or "fp32" not in kind  # its tower does not cast pixels to its dtype
    ]
    runs += [
        (f"{name}: pictures without a label", 2, partial(pictures_without_a_label, name))
        for name in FULLY_TESTED
    ]
    runs += [
        (f"{name}: skipped backward", 2, partial(encoders_after_a_skipped_backward, name))
        for name in FULLY_TESTED
    ]
    runs += [
        (f"{name}: low precision", 2, partial(generate_in_low_precision, name))
        for name in (*FULLY_TESTED, *DO_NOT_CAST)
    ]
    runs.append(("HSDP", 4, partial(accumulate_gradients, "kimi_k25", dp_replicate_size=2)))
    return [
        Check(name, world, run, slow=True, timeout=120.0).as_parameter()
        for name, world, run in runs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("claim", _list_checks())
def test_uneven_ranks_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
