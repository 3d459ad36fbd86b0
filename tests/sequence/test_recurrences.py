"""Recurrences that are split by heads equal stock, and send as many bytes as the docstring says.

The tests vary the number of heads and tokens. `test_granted.py` compares all types that have a
recurrence with stock code.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
from support.architectures import MODEL_TYPES, batch
from support.architectures.split_steps import equals_stock_backward
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.fp64 import FP64
from support.needs import SINCE_5_23
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next as stock_file

from hf_moe_ep import apply_ep_fsdp2, describe, patch
from hf_moe_ep.sequence import slices, ulysses
from hf_moe_ep.upstream.recurrences import (
    RECURRENCES,
    has_recurrence,
    mixes_by_convolution_alone,
)

_NAMES = inspect.unwrap(stock_file.Qwen3NextGatedDeltaNet.forward).__code__.co_names
RECURRENCE = next((name for name in RECURRENCES if name in _NAMES), "")
SKIP = "" if RECURRENCE else "this transformers' delta nets call attributes and get whole sequences"
SKIP_COUNTS = SKIP or ("" if SINCE_5_23 else "older delta nets repeat the heads of their keys")
# The tiny model has 4 value heads, 2 key heads, and convolutions of 3 tokens.
LENGTH = 11


def kernels_get_heads_and_flags(rank: int, world: int) -> None:
    """The recurrence gets all tokens of half of the heads, and every flag that stock code sets.

    The convolution gets the tokens of this rank behind two tokens of the previous rank.
    """
    calls: dict[str, Any] = {}

    def recorded(name: str) -> Any:
        stock = getattr(stock_file, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
            named = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in kwargs.items()}
            calls.setdefault(name, (shapes, named))
            return stock(*args, **kwargs)

        return call

    model = build("qwen3_next", seed=rank)
    apply_ep_fsdp2(model, sp_size=world)
    names = ("causal_conv1d_fn", RECURRENCE)
    with mock.patch.multiple(stock_file, **{name: recorded(name) for name in names}):
        model(**batch(model, 2, LENGTH))
    (convolved, *_), options = calls["causal_conv1d_fn"]
    assert convolved[2] == 2 + 6 and options["activation"] == "silu"
    shapes, options = calls[RECURRENCE]
    config = model.config
    assert shapes == [
        (2, LENGTH, 1, config.linear_key_head_dim),
        (2, LENGTH, 1, config.linear_key_head_dim),
        (2, LENGTH, 2, config.linear_value_head_dim),
    ]
    assert options["g"] == options["beta"] == (2, LENGTH, 2)
    assert options["use_qk_l2norm_in_kernel"] is True
    assert options["output_final_state"] is False and options["initial_state"] is None


@dataclass(frozen=True)
class Sent:
    """The values that the mixers of a model send, as the docstring of recurrences.py counts them.

    Attributes:
        swapped: the values per token whose heads are exchanged, with the outputs.
        gathered: the values per token that are gathered.
        halos: the channels of each convolution, in the order of the layers.
    """

    swapped: int
    gathered: int
    halos: list[int]


def _count_delta_net(config: Any) -> Sent:
    """Count queries, keys, values, outputs, and two gates per head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    number = config.layer_types.count("linear_attention")
    per_layer = 2 * keys + 2 * values + 2 * config.linear_num_value_heads
    return Sent(number * per_layer, 0, [2 * keys + values] * number)


def _count_kda(config: Any) -> Sent:
    """Count queries, keys, values, outputs, a gate per channel, and a gate per head.

    The layers with latent attention are replaced by layers with KDA.
    """
    channels = config.linear_num_heads * config.linear_head_dim
    number = config.num_hidden_layers
    return Sent(number * (5 * channels + config.linear_num_heads), 0, [3 * channels] * number)


def _count_mamba_2(config: Any) -> Sent:
    """Count x, the output, dt, B and C."""
    values = config.mamba_num_heads * config.mamba_head_dim
    groups = config.n_groups * config.ssm_state_size
    number = config.layers_block_type.count("linear_attention")
    per_layer = 2 * values + config.mamba_num_heads + 2 * groups
    return Sent(number * per_layer, 0, [values + 2 * groups] * number)


def _count_mamba_1(config: Any) -> Sent:
    """Count u, delta, the gate and the output as swapped, and B and C as gathered."""
    channels = config.mamba_expand * config.hidden_size
    number = sum(kind != "full_attention" for kind in config.layer_types)
    per_token = 2 * number * config.mamba_d_state
    return Sent(4 * channels * number, per_token, [channels] * number)


def _count_short_convolution(config: Any) -> Sent:
    return Sent(0, 0, [config.hidden_size] * config.layer_types.count("conv"))


def _compare_bytes(model_type: str, count: Any, rank: int, world: int) -> None:
    """Compare the bytes that a rank sends with the counts of the docstring.

    A rank exchanges the values of its tokens, and gathers a few tokens per slice for the halos. In
    backward it sends as many gradients.
    """
    options = {"layer_types": ["linear_attention"] * 4} if count is _count_kda else {}
    model = build(model_type, seed=rank, **options)
    config = model.config
    apply_ep_fsdp2(model, sp_size=world)
    sizes: dict[str, list[int]] = {"swap": [], "gather": [], "gather, backward": []}

    def counted(kind: str, stock: Any) -> Any:
        return lambda x, group: sizes[kind].append(x.nbytes) or stock(x, group)

    with (
        FP64(),  # every value has 8 bytes
        mock.patch.object(ulysses, "swap_slices", counted("swap", ulysses.swap_slices)),
        mock.patch.object(slices, "all_gather", counted("gather", slices.all_gather)),
        mock.patch.object(slices, "swap_slices", counted("gather, backward", slices.swap_slices)),
    ):
        loss = model(**batch(model, 2, 12), use_cache=False).loss
        forward = {kind: list(x) for kind, x in sizes.items()}
        loss.backward()
    sent: Sent = count(config)
    heads = config.num_attention_heads + config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * heads * head_dim * config.layer_types.count("full_attention")
    tokens = 2 * 6 * 8
    assert sum(forward["swap"]) == tokens * (sent.swapped + attention)
    assert sum(sizes["swap"]) == 2 * sum(forward["swap"])
    (*others, loss_bytes) = forward["gather"]
    width = 2  # the tokens of a kernel in front of its last token
    halos = sum(2 * width * channels * 8 for channels in sent.halos)
    assert sum(others) == halos + tokens * sent.gathered and loss_bytes == 8
    assert not forward["gather, backward"]
    assert sum(sizes["gather, backward"]) == world * sum(others), "one part for each rank"
    assert sizes["gather"] == [*others, loss_bytes, loss_bytes]


def unknown_recurrences_get_whole_sequences(rank: int, world: int) -> None:
    """A newer transformers may rename a recurrence. Its convolution must not get a halo alone."""
    kind = stock_file.Qwen3NextGatedDeltaNet
    stock = inspect.unwrap(kind.forward)
    names = tuple("renamed" if name == RECURRENCE else name for name in stock.__code__.co_names)
    values = {**stock.__globals__, "renamed": getattr(stock_file, RECURRENCE)}
    renamed = FunctionType(stock.__code__.replace(co_names=names), values, "forward")
    with mock.patch.object(kind, "forward", renamed):
        equals_stock_backward("qwen3_next", rank, world)
        report = describe(patch(build("qwen3_next"), sp_size=world))
    assert "gathered for model.layers.*.linear_attn" in report


BYTES: dict[str, Any] = {
    f"bytes of {name}": partial(_compare_bytes, name, count)
    for name, count in {
        "qwen3_next": _count_delta_net,
        "kimi_linear": _count_kda,
        "nemotron_h": _count_mamba_2,
        "jamba": _count_mamba_1,
        "lfm2_moe": _count_short_convolution,
    }.items()
    if name in MODEL_TYPES
}
# The number of ranks does not divide three heads, so states are passed on (test_states.py).
THREE_HEADS = {"linear_num_value_heads": 3, "linear_num_key_heads": 3}
SIZES: dict[str, Any] = {
    name: partial(equals_stock_backward, "qwen3_next", **options)
    for name, options in {
        "heads that 2 does not divide": {"sizes": THREE_HEADS},
        "one key head": {"sizes": {"linear_num_key_heads": 1}},
        "a slice shorter than the halo": {"length": 3},
        "the shortest slice with a halo": {"length": 6},
    }.items()
}
_DELTA_NET = partial(equals_stock_backward, "qwen3_next", length=29, sizes=THREE_HEADS)
_MAMBA_2 = partial(
    equals_stock_backward, "nemotron_h", length=29, sizes={"mamba_num_heads": 3, "n_groups": 1}
)
STATES: dict[str, Any] = {
    "delta net, cp 4": partial(_DELTA_NET, cp=4),
    "delta net, cp 2 x sp 2, checkpoint": partial(_DELTA_NET, cp=2, use_reentrant=False),
    "Mamba-2, cp 4, reentrant": partial(_MAMBA_2, cp=4, use_reentrant=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(4, STATES, skip=SKIP_COUNTS))
def test_states_are_passed_in_models(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, SIZES, unknown_recurrences_get_whole_sequences, skip=SKIP),
        *on_ranks(2, kernels_get_heads_and_flags, BYTES, skip=SKIP_COUNTS),
    ],
)
def test_recurrences_equal_stock_and_send_the_counted_bytes(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.skipif(bool(SKIP), reason=SKIP)
def test_a_mixer_whose_forward_was_replaced_gets_whole_sequences() -> None:
    """A kernel for a whole mixer may replace its forward. It cannot run for some of the heads."""
    model: Any = build("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    assert has_recurrence(mixer)
    mixer.forward = lambda hidden_states, **kwargs: hidden_states
    assert not has_recurrence(mixer)
    report = describe(patch(model, sp_size=2))
    assert "gathered for model.layers.*.linear_attn" in report
    assert "heads split in model.layers.*.linear_attn" in report


@pytest.mark.skipif("lfm2_moe" not in MODEL_TYPES, reason="this transformers has no such type")
def test_a_convolution_beside_unknown_functions_gets_whole_sequences() -> None:
    """A function in an attribute, or a child that takes several tensors, may be a recurrence."""
    model: Any = build("lfm2_moe")
    mixers = [layer.conv for layer in model.model.layers if hasattr(layer, "conv")]
    assert all(map(mixes_by_convolution_alone, mixers))
    mixers[0].chunk = lambda x: x  # the forward uses a name "chunk"
    mixers[1].scan = nn.Bilinear(2, 2, 2)
    assert not any(map(mixes_by_convolution_alone, mixers[:2]))
