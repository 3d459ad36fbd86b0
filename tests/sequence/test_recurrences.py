"""Delta nets that are split by heads call the stock kernels, for any number of heads and tokens.

`test_granted.py` compares all types that have a delta net with stock code.
"""

import inspect
from functools import partial
from typing import Any
from unittest import mock

import pytest
from support.architectures import batch
from support.architectures.steps import (
    assert_same_grads,
    build,
    count_tokens,
    loss_of_sum,
)
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as stock_file

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.sequence import slices, ulysses
from hf_moe_ep.upstream.recurrences import RECURRENCES

_NAMES = inspect.unwrap(stock_file.Qwen3NextGatedDeltaNet.forward).__code__.co_names
RECURRENCE = next((name for name in RECURRENCES if name in _NAMES), "")
SKIP = "" if RECURRENCE else "this transformers' delta nets call attributes and get whole sequences"
# The tiny model has 4 heads of values, 2 heads of keys, and convolutions of 3 tokens.
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


def bytes_of_heads(rank: int, world: int) -> None:
    """A rank exchanges the values of all heads of its tokens, and gathers two tokens per slice."""
    model = build("qwen3_next", seed=rank)
    config = model.config
    apply_ep_fsdp2(model, sp_size=world)
    swapped: list[int] = []
    gathered: list[int] = []
    swap, gather = ulysses.swap_slices, slices.all_gather
    with (
        mock.patch.object(
            ulysses, "swap_slices", lambda x, group: swapped.append(x.nbytes) or swap(x, group)
        ),
        mock.patch.object(
            slices, "all_gather", lambda x, group: gathered.append(x.nbytes) or gather(x, group)
        ),
    ):
        model(**batch(model, 2, 12))
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.num_attention_heads + config.num_key_value_heads
    # Queries, keys, values, outputs, and two gates per head.
    delta_net = 8 * (2 * keys + 2 * values + 2 * config.linear_num_value_heads)
    attention = 8 * 2 * heads * config.head_dim
    kinds = config.layer_types
    delta_nets = kinds.count("linear_attention")
    per_token = delta_nets * delta_net + (len(kinds) - delta_nets) * attention
    assert sum(swapped) == 2 * 6 * per_token
    (*halos, of_loss) = gathered
    assert halos == [2 * 2 * (2 * keys + values) * 8] * delta_nets and of_loss in (4, 8)


def _equals_stock(length: int, options: dict[str, int], rank: int, world: int) -> None:
    with FP64():
        model = build("qwen3_next", seed=rank, **options)
        stock = build("qwen3_next", **options)
        apply_ep_fsdp2(model, ep_size=2, sp_size=world)
        inputs = batch(stock, 2, length)
        num_tokens = count_tokens([inputs])
        loss = loss_of_sum(model, inputs, num_tokens)
        loss.backward()
        want = loss_of_sum(stock, inputs, num_tokens)
        want.backward()
        assert_close("loss", loss, want, FP64_MODEL)
        assert_same_grads("delta net", model, stock, FP64_MODEL)


SIZES: dict[str, Any] = {
    "heads that 2 does not divide": partial(
        _equals_stock, LENGTH, {"linear_num_value_heads": 3, "linear_num_key_heads": 3}
    ),
    "one head of keys": partial(_equals_stock, LENGTH, {"linear_num_key_heads": 1}),
    "a slice shorter than the halo": partial(_equals_stock, 3, {}),
    "the shortest slice with a halo": partial(_equals_stock, 6, {}),
}


@pytest.mark.parametrize(
    "claim", on_ranks(2, kernels_get_heads_and_flags, bytes_of_heads, SIZES, skip=SKIP)
)
def test_delta_net(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
