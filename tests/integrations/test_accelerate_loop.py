"""Test that an Accelerator loop on 2 ranks with common options equals stock in one process.

Stock trains on the concatenated batches of both ranks.
"""

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from support.architectures.steps import batches, build
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched, prepared
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

from hf_moe_ep import compile_layers, global_token_count, patch
from hf_moe_ep.state import patched_state

WORLD, STEPS, MICRO = 2, 3, 2
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
State = dict[str, Tensor]


def _compare_with_stock(
    options: dict[str, Any], model_options: dict[str, Any], rank: int, world: int
) -> None:
    model = tiny(dtype=torch.float32, seed=rank, **model_options)
    actual = _train(model, rank, **options)
    expected = _train_stock(tiny(dtype=torch.float32, **model_options))
    if rank == 0:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(name, actual[name], value, FP32_BUDGET)


def bf16_error_is_at_most_twice_that_of_stock_bf16(rank: int, world: int) -> None:
    """Both have fp32 weights. The error is the 2-norm of the difference after three steps."""
    actual = _train(tiny(dtype=torch.float32), rank, mixed_precision="bf16")
    truth = _train_stock(tiny())
    stock = _train_stock(tiny(dtype=torch.float32), bf16=True)
    if rank == 0:
        own_error, stock_error = (_compute_distance(state, truth) for state in (actual, stock))
        assert 0 < own_error <= 2 * stock_error, (
            f"error {own_error:.3e}, stock's is {stock_error:.3e}"
        )


def a_router_of_inkling_2_needs_autocast(rank: int, world: int) -> None:
    """FSDP2 casts the weight of stock's router, but not its activations (docs/limits.md)."""
    with launched():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = build("inkling2_text").float()
        accelerator, model, _ = prepared(model, accelerator, torch.optim.SGD, ep_size=2)
        inputs = batches(model, world)[rank]
        with accelerator.autocast():
            loss = model(**inputs).loss
        accelerator.backward(loss)
        assert torch.isfinite(loss)
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            model(**inputs)


def _compute_distance(state: State, truth: State) -> float:
    squares = [(state[name].double() - value).square().sum() for name, value in truth.items()]
    return torch.stack(squares).sum().sqrt().item()


def _list_micro_batches(rank: int, step: int) -> list[dict[str, Tensor]]:
    model = tiny(num_hidden_layers=1)
    seeds = [50 * step + 10 * i + rank for i in range(MICRO)]
    return [batch(model, 3, 9 + step, seed=seed, pad=3) for seed in seeds]


def _train(model: nn.Module, rank: int, **options: Any) -> State:
    with launched():
        accelerator = Accelerator(cpu=True, **options)
        accelerator, model, optimizer = prepared(model, accelerator, torch.optim.SGD, ep_size=2)
        for step in range(STEPS):
            micro = _list_micro_batches(rank, step)
            num_tokens = global_token_count(model, [inputs["labels"] for inputs in micro])
            for inputs in micro:
                loss = model(**inputs, num_items_in_batch=num_tokens).loss
                accelerator.backward(loss * accelerator.num_processes)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


def _train_stock(model: nn.Module, bf16: bool = False) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        ranks = [_list_micro_batches(rank, step) for rank in range(WORLD)]
        labels = [inputs["labels"][:, 1:] for micro in ranks for inputs in micro]
        num_tokens = sum(label.ne(-100).sum() for label in labels)
        for parts in zip(*ranks, strict=True):
            joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**joined, num_items_in_batch=num_tokens).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


NOT_COMPILED = {
    "router aux loss of padded batches equals stock": partial(_compare_with_stock, {}, AUX_LOSS),
}
BF16 = {
    "bf16 error is at most twice that of stock": bf16_error_is_at_most_twice_that_of_stock_bf16,
    "a router of Inkling-2 needs autocast": a_router_of_inkling_2_needs_autocast,
}
COMPILED = {
    "inductor": {"dynamo_backend": "inductor"},
    # `accelerate launch` passes dynamic=False, unless its config asks for dynamic shapes.
    "by regions": {
        "dynamo_plugin": TorchDynamoPlugin(
            backend="aot_eager", dynamic=False, use_regional_compilation=True
        )
    },
}


def _compare_compiled_layers(options: dict[str, Any], rank: int, world: int) -> None:
    """Accelerate itself compiles nothing. Its settings are used for the two graphs of all layers.

    The sequences are longer in each step.
    """
    counters.clear()
    _compare_with_stock(options, {}, rank, world)
    assert counters["stats"]["unique_graphs"] == 2, dict(counters["graph_break"])


def an_unsupported_mode_is_refused(rank: int, world: int) -> None:
    plugin = TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    with launched(), pytest.raises(ValueError, match=r"mode='reduce-overhead' records CUDA graphs"):
        prepared(tiny(), Accelerator(cpu=True, dynamo_plugin=plugin), torch.optim.SGD, ep_size=2)
    assert plugin.backend == DynamoBackend.INDUCTOR


def backend_and_mode_of_training_arguments_are_used(rank: int, world: int) -> None:
    """The Trainer passes both to its Accelerator. Nothing is compiled without a forward."""
    given = {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}
    with launched(), TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, **{f"torch_compile_{name}": x for name, x in given.items()}
        )
        model = patch(tiny(), ep_size=2)
        trainer = Trainer(model, arguments)
        spy = mock.create_autospec(torch.compile, side_effect=torch.compile)
        with mock.patch.object(torch, "compile", spy):
            trainer.accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert patched_state(model).compile_options is not None
    assert spy.call_args_list
    for call in spy.call_args_list:
        assert call.kwargs.items() >= given.items()
        assert call.kwargs["dynamic"] is True


def options_that_differ_from_those_of_the_model_are_refused(rank: int, world: int) -> None:
    """The layers are compiled by `patch`, or by a call of `compile_layers`."""
    plugin = TorchDynamoPlugin(backend="inductor", mode="max-autotune-no-cudagraphs")
    with launched():
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        for own, match in (
            ({"backend": "aot_eager"}, "backend='inductor'.*compiled with backend='aot_eager'"),
            ({}, "mode='max-autotune-no-cudagraphs'.*compiled with mode=None"),
        ):
            patched = patch(tiny(), ep_size=2, compile_layers=own)
            by_hand = compile_layers(patch(tiny(), ep_size=2), **own)
            for model in (patched, by_hand):
                with pytest.raises(ValueError, match=match):
                    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        same = patch(tiny(), ep_size=2, compile_layers={"mode": plugin.mode})
        accelerator.prepare(same, torch.optim.SGD(same.parameters()))
    assert patched_state(same).compile_options["mode"] == plugin.mode


def a_disabled_plugin_compiles_nothing(rank: int, world: int) -> None:
    counters.clear()
    plugin = TorchDynamoPlugin(backend="inductor", disable=True)
    _train(tiny(dtype=torch.float32), rank, dynamo_plugin=plugin)
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(
            WORLD,
            NOT_COMPILED,
            an_unsupported_mode_is_refused,
            backend_and_mode_of_training_arguments_are_used,
            options_that_differ_from_those_of_the_model_are_refused,
            a_disabled_plugin_compiles_nothing,
        ),
        *on_ranks(WORLD, BF16, slow=True),
        *on_ranks(
            WORLD,
            {
                f"compiled, {name}, equals stock": partial(_compare_compiled_layers, options)
                for name, options in COMPILED.items()
            },
            slow=True,
            timeout=400,
        ),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
