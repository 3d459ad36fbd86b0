"""The comparison with stock notices errors on purpose in the ways in which mixers are divided.

Each error replaces a function of `hf_moe_ep/sequence/` on every rank: a halo or a slice of heads is
off by one, or slices are gathered in the wrong order. test_granted.py compares the same types
without an error.
"""

from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from support.architectures import MODEL_TYPES
from support.architectures.split_steps import equals_stock_backward
from support.checks import Check, Found
from support.needs import SINCE_5_23
from torch import Tensor

from hf_moe_ep.sequence import gathering_cache, mixers, recurrences, split, states
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.upstream.recurrences import Layout, Recurrence

_convolve_slice, _exchange = recurrences.convolve_slice, recurrences.exchange_for_heads
_gather_slices, _run_recurrence = states.gather_slices, recurrences.run_recurrence


def delay_halo(part: Slice, stock: Any, x: Tensor, weight: Tensor, *args: Any, **kw: Any) -> Tensor:
    """Give the convolution a halo that ends one token too early."""
    width = weight.shape[-1] - 1

    def convolve(x_BCS: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        halo, own = x_BCS[:, :, :width], x_BCS[:, :, width:]
        early = torch.cat([torch.zeros_like(halo[:, :, :1]), halo[:, :, :-1]], 2)
        return stock(torch.cat([early, own], 2), *args, **kwargs)

    return _convolve_slice(part, convolve, x, weight, *args, **kw)


def shift_heads(tensors: Any, part: Slice) -> Any:
    """Let the heads of each rank begin one head too early."""
    return _exchange([x_BQSW.roll(1, 1) for x_BQSW in tensors], part)


def shift_parameters(
    part: Slice, recurrence: Recurrence, stock: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let the slices of parameters that have one entry per head begin one head too early."""
    layouts = recurrence.layouts(args, kwargs)
    given = {
        key: x.roll(1, 0) if layouts.get(key) == Layout.PER_HEAD else x
        for key, x in (dict(enumerate(args)) | kwargs).items()
    }
    shifted = [given.pop(index) for index in range(len(args))]
    return _run_recurrence(part, recurrence, stock, *shifted, **given)


def swap_slices(x: Tensor, part: Slice) -> Tensor:
    """Gather the slices in another order of the ranks."""
    return _gather_slices(x, part).roll(part.local_length, 1)


# States of recurrences are passed on only if the number of ranks does not divide the heads.
THREE_HEADS = {"sizes": {"linear_num_value_heads": 3, "linear_num_key_heads": 3}}
# Name -> the model type, the module and the name of the replaced function, and its replacement.
WRONG: dict[str, tuple[str, ModuleType, str, Any]] = {
    "halo of a short convolution": ("lfm2_moe", recurrences, "convolve_slice", delay_halo),
    "halo of a delta net": ("qwen3_next", recurrences, "convolve_slice", delay_halo),
    "heads of a delta net": ("qwen3_next", recurrences, "exchange_for_heads", shift_heads),
    "heads of KDA": ("kimi_linear", recurrences, "exchange_for_heads", shift_heads),
    "heads of Mamba-2": ("nemotron_h", recurrences, "exchange_for_heads", shift_heads),
    "parameters of Mamba-2": ("nemotron_h", recurrences, "run_recurrence", shift_parameters),
    "channels of Mamba-1": ("jamba", recurrences, "exchange_for_heads", shift_heads),
    "order of Mamba-1's B and C": ("jamba", recurrences, "gather_slices", swap_slices),
    "order of states": ("qwen3_next", states, "gather_slices", swap_slices),
    "order of hidden states": ("minimax", mixers, "gather_slices", swap_slices),
    "order of keys": ("deepseek_v32", gathering_cache, "gather_slices", swap_slices),
    "order of compressed keys": ("deepseek_v4", gathering_cache, "gather_slices", swap_slices),
    "order of layers' outputs": ("inkling2_text", split, "gather_slices", swap_slices),
}
FAST = ("halo of a short convolution", "heads of a delta net", "order of hidden states")


def _comparison_fails(name: str, rank: int, world: int) -> None:
    model_type, module, function, wrong = WRONG[name]
    options: Any = THREE_HEADS if module is states else {}
    with (
        mock.patch.object(module, function, side_effect=wrong) as replaced,
        pytest.raises(AssertionError, match="is over the budget"),
    ):
        equals_stock_backward(model_type, rank, world, **options)
    assert replaced.called


@pytest.mark.skipif(not SINCE_5_23, reason="mixers of older transformers get whole sequences")
@pytest.mark.parametrize(
    "claim",
    [
        Check(name, 2, partial(_comparison_fails, name), slow=name not in FAST).as_parameter()
        for name, (model_type, *_) in WRONG.items()
        if model_type in MODEL_TYPES
    ],
)
def test_the_comparison_notices_an_error_in(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
