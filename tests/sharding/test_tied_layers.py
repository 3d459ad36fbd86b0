"""Two towers share the parameters of their layers: each layer and its tied layer are one unit.

In DiffusionGemma, a canvas of tokens attends to the keys and values of a prompt. The layers of the
prompt and the layers of the canvas have the same parameters. The forward takes no labels, so the
loss is computed in this file. Within `FP64`, stock's fp32 parts compute in fp64.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.architectures import MODEL_TYPES
from support.architectures.steps import adamw, assert_same_grads, batches, build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.hub_files import assert_equal, read_all
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, balance_experts, expert_load, patch, save_pretrained
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.upstream.sharded_models import is_gathered

MODEL_TYPE, CANVAS = "diffusion_gemma", 6
pytestmark = pytest.mark.skipif(
    MODEL_TYPE not in MODEL_TYPES, reason=f"this transformers has no {MODEL_TYPE}"
)
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def compute_canvas_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the sum of the canvas tokens' losses, divided by a fixed number of tokens."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**given).logits.flatten(0, 1)
    return F.cross_entropy(logits, inputs["labels"].flatten(), reduction="sum") / 10


def compute_prompt_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return a loss that depends on the output of the first tower only."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    return model(**given).encoder_last_hidden_state.square().sum() / 10


def compute_cached_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the loss of a forward that runs the second tower alone."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        cache = model(**given).cache
    prompt = ("input_ids", "attention_mask")
    given = {name: value for name, value in given.items() if name not in prompt}
    return compute_canvas_loss(model, {**given, "cache": cache, "labels": inputs["labels"]})


def assert_equals_stock(
    rank: int,
    world: int,
    losses: tuple[Loss, ...] = (compute_canvas_loss, compute_canvas_loss),
    **config: Any,
) -> None:
    """Compare the gradients of several forwards and backwards, which are added up, with stock."""
    with FP64():
        model, stock = build(MODEL_TYPE, seed=rank), build(MODEL_TYPE)
        apply_ep_fsdp2(model, **config)
        for step, loss_of in enumerate(losses):
            by_rank = batches(stock, world, seed=10 * step)
            (loss_of(model, by_rank[rank]) * world).backward()
            for inputs in by_rank:
                loss_of(stock, inputs).backward()
        assert_same_grads(str(config), model, stock, FP64_MODEL)


def list_layers_of_towers(model: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    return [*model.model.encoder.language_model.layers], [*model.model.decoder.layers]


def layers_are_gathered_one_after_the_other(rank: int, world: int) -> None:
    """The last layer, with which backward begins, stays gathered from its first forward on."""
    model = build(MODEL_TYPE, seed=rank)
    (inputs,) = batches(model, 1)
    apply_ep_fsdp2(model)
    gathered: list[list[int]] = []
    first, second = list_layers_of_towers(model)

    def record(*_: Any) -> None:
        for tower in (first, second):
            gathered.append([i for i, layer in enumerate(tower) if is_gathered(layer)])

    for layer in chain(first, second):
        layer.register_forward_pre_hook(record)
    compute_canvas_loss(model, inputs).backward()
    in_first_tower = [[0], [1], [2], [3]]
    in_second_tower = [[0, 3], [1, 3], [2, 3], [3]]
    want = [[i, i] for i in (*in_first_tower, *in_second_tower)]  # a layer and its tied layer
    assert gathered == [*chain(*want)]


def towers_share_parameters_and_are_saved_in_the_loaded_dtype(
    rank: int, world: int, folder: str
) -> None:
    """Master weights are fp32. As in stock, the files have the names of the second tower."""
    model = build(MODEL_TYPE).to(torch.bfloat16)
    model.save_pretrained(Path(folder, "stock"))  # rank 0 writes
    apply_ep_fsdp2(model, ep_size=2)
    assert all(
        a is b
        for a, b in zip(
            *(chain(*map(nn.Module.parameters, x)) for x in list_layers_of_towers(model))
        )
    )
    save_pretrained(model, Path(folder, "ours"))
    stock = load_file(Path(folder, "stock", "model.safetensors"))
    assert_equal(read_all(Path(folder, "ours")), stock)


def make_batch_with_prompt_as_long_as_canvas(model: nn.Module) -> dict[str, Tensor]:
    """Make a batch whose prompt has padding, with the labels of the canvas, which stock ignores."""
    (inputs,) = batches(model, 1)
    inputs = {name: value[:, -CANVAS:] for name, value in inputs.items()}
    inputs["attention_mask"][:, :2] = 0
    inputs["labels"][:, :3] = -100
    return inputs | {
        "decoder_attention_mask": F.pad(inputs["attention_mask"], (0, CANVAS), value=1)
    }


def padding_of_the_prompt_is_not_padding_of_the_canvas(rank: int, world: int) -> None:
    with FP64():
        model, stock = build(MODEL_TYPE, seed=rank), build(MODEL_TYPE)
        apply_ep_fsdp2(model, ep_size=2)
        inputs = make_batch_with_prompt_as_long_as_canvas(stock)
        assert_close("logits", model(**inputs).logits, stock(**inputs).logits, FP64_MODEL)


def balancing_refuses_experts_that_two_layers_share(rank: int, world: int) -> None:
    model = build(MODEL_TYPE)
    apply_ep_fsdp2(model, ep_size=2)
    with pytest.raises(ValueError, match="two layers with loads of their own share the same exp"):
        balance_experts(model, adamw(model), expert_load(model))


CHECKS = [
    *on_ranks(
        2,
        layers_are_gathered_one_after_the_other,
        towers_share_parameters_and_are_saved_in_the_loaded_dtype,
        padding_of_the_prompt_is_not_padding_of_the_canvas,
        balancing_refuses_experts_that_two_layers_share,
        {
            "ep 1": partial(assert_equals_stock, ep_size=1),
            "ep 2": partial(assert_equals_stock, ep_size=2),
            "eager experts": partial(assert_equals_stock, experts_backend="eager"),
            "fixed buffers": partial(assert_equals_stock, ep_size=1, fsdp_double_buffer=True),
            "compiled": partial(assert_equals_stock, ep_size=1, compile_layers=True),
            "a loss of the prompt": partial(
                assert_equals_stock, losses=(compute_prompt_loss, compute_canvas_loss), ep_size=2
            ),
            "a given cache": partial(
                assert_equals_stock, losses=(compute_cached_loss, compute_canvas_loss), ep_size=1
            ),
        },
        slow=True,
    ),
    *on_ranks(
        4,
        {
            "ep_fsdp 2, ep 2": partial(assert_equals_stock, ep_size=2),
            "two replicas": partial(assert_equals_stock, ep_size=2, dp_replicate_size=2),
        },
        slow=True,
    ),
]


@pytest.mark.parametrize("claim", CHECKS)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_tokens_of_the_canvas_are_counted_whatever_the_mask_of_the_prompt() -> None:
    model = patch(build(MODEL_TYPE))
    inputs = make_batch_with_prompt_as_long_as_canvas(model)
    model(**inputs)
    top_k = model.config.text_config.top_k_experts
    assert expert_load(model).counts.sum(1).tolist() == [CANVAS * top_k] * 8


def test_a_plan_of_the_user_must_name_the_tied_layers() -> None:
    model = build(MODEL_TYPE)
    plan = replace(find_plan(model), origin="given")
    assert (plan.layers, plan.tied_layers) == (
        "encoder.language_model.layers.*",
        "decoder.layers.*",
    )
    patch(model, plan=plan)
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.experts is in none of the 4 layers"):
        patch(model, plan=replace(plan, tied_layers=""))


@pytest.mark.parametrize(
    "setting",
    [{"pp_size": 2}, {"bias_update_rate": 1e-3}],
)
def test_settings_for_layers_that_run_once_are_refused(setting: dict[str, Any]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=f"{name}={value} needs decoder layers that run once"):
        patch(build(MODEL_TYPE), **setting)
