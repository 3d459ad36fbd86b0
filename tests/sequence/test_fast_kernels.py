"""Mixers that are divided call the kernels of other packages with the arguments of stock code.

The kernels need a GPU, so fake kernels record their arguments (support/fakes/kernels.py).
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import MODEL_TYPES, batch
from support.architectures.steps import build, loss_of_sum
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.fakes import kernels
from support.fp64 import FP64
from support.needs import SINCE_5_23
from torch import Tensor

from hf_moe_ep import apply_ep_fsdp2

Recorded = dict[str, list[dict[str, Any]]]
BATCH, LENGTH = 2, 12
# For each kernel: {argument with one entry per head: the dimension that counts heads}.
HEADS = {
    "chunk_gated_delta_rule": dict.fromkeys(("q", "k", "v", "g", "beta"), 2),
    "chunk_kda": dict.fromkeys(("q", "k", "v", "g", "beta"), 2),
    "mamba_chunk_scan_combined": dict.fromkeys(("x", "dt", "B", "C"), 2)
    | dict.fromkeys(("A", "D", "dt_bias"), 0),
    "selective_scan_fn": dict.fromkeys(("u", "delta", "z"), 1)
    | dict.fromkeys(("A", "D", "delta_bias"), 0),
    "causal_conv1d_fn": {},
    "torch_chunk_gated_delta_rule": dict.fromkeys(("query", "key", "value", "g", "beta"), 2),
}
# The functions of qwen3_next for which the package `kernels` has kernels of the hub.
FROM_HUB = {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}
FUSED = "mamba_split_conv1d_scan_combined"
# For each model type, the kernels that its forward calls.
TYPES = {
    "qwen3_next": {"causal_conv1d_fn", "chunk_gated_delta_rule"},
    "kimi_linear": {"causal_conv1d_fn", "chunk_kda"},
    "bailing_hybrid": {"causal_conv1d_fn", "chunk_kda"},
    "nemotron_h": {"causal_conv1d_fn", "mamba_chunk_scan_combined"},
    "jamba": {"causal_conv1d_fn", "selective_scan_fn"},
    "lfm2_moe": {"causal_conv1d_fn"},
}


def _record_calls(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Recorded]:
    kernels.calls.clear()
    loss = loss_of_sum(model, inputs | {"use_cache": False}, inputs["labels"].ne(-100).sum())
    return loss, {name: [dict(call) for call in calls] for name, calls in kernels.calls.items()}


def _compare_calls(model_type: str, rank: int, world: int) -> None:
    """Compare the arguments of each call with stock code.

    Flags must be equal, and tensors must have half of the heads and all tokens. The convolution
    gets half of the tokens, behind the halo.
    """
    kernels.install()
    with FP64():
        stock, model = build(model_type), build(model_type, seed=rank)
        kernels.current.append(kernels.file_of(stock))
        inputs = batch(stock, BATCH, LENGTH)
        want_loss, want = _record_calls(stock, inputs)
        apply_ep_fsdp2(model, sp_size=world)
        loss, got = _record_calls(model, inputs)
    assert_close("loss", loss, want_loss, FP64_MODEL)
    assert want.keys() - {FUSED} == TYPES[model_type] == got.keys(), "the fused kernel has no heads"
    _assert_same_calls(got, want, world)


def _compare_calls_of_the_hub(rank: int, world: int) -> None:
    """The kernels of the hub are loaded after the model was patched and sharded."""
    stock, model = build("qwen3_next"), build("qwen3_next", seed=rank)
    file = kernels.file_of(stock)
    with FP64(), kernels.wrap_functions(file, FROM_HUB):
        apply_ep_fsdp2(model, sp_size=world)
        kernels.kernelize(file)
        inputs = batch(stock, BATCH, LENGTH)
        want_loss, want = _record_calls(stock, inputs)
        loss, got = _record_calls(model, inputs)
    assert_close("loss", loss, want_loss, FP64_MODEL)
    assert want.keys() == FROM_HUB == got.keys()
    _assert_same_calls(got, want, world)


def _assert_same_calls(got: Recorded, want: Recorded, world: int) -> None:
    for kernel, calls in got.items():
        for call, like in zip(calls, want[kernel], strict=True):
            expected = {
                name: _find_shape(kernel, name, like, world) if isinstance(x, torch.Size) else x
                for name, x in like.items()
            }
            assert call == expected, f"{kernel}: {call}, want {expected}"


def _find_shape(kernel: str, name: str, like: dict[str, Any], world: int) -> Any:
    shape = like[name]
    if kernel == "causal_conv1d_fn" and name in ("x", "hidden_states"):
        width = like["weight"][1]
        return (*shape[:2], LENGTH // world + width - 1)
    if name in HEADS[kernel]:
        dim = HEADS[kernel][name]
        return (*shape[:dim], shape[dim] // world, *shape[dim + 1 :])
    return shape


FAST = ("qwen3_next", "nemotron_h")
CHECKS = [
    Check(
        name,
        2,
        partial(_compare_calls, name),
        slow=name not in FAST,
        skip="" if SINCE_5_23 else "older transformers finds the kernels in another way",
    ).as_parameter()
    for name in TYPES
    if name in MODEL_TYPES
]
CHECKS.append(
    Check(
        "qwen3_next, kernels of the hub",
        2,
        _compare_calls_of_the_hub,
        slow=True,
        skip="" if SINCE_5_23 else "older transformers finds the kernels in another way",
    ).as_parameter()
)


@pytest.mark.parametrize("claim", CHECKS)
def test_kernels_get_the_arguments_of_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
