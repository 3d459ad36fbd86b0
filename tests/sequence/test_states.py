"""Recurrences whose states are passed from piece to piece equal a scan of the whole sequence.

`test_recurrences.py` compares models whose heads the ranks do not divide.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from torch import Tensor
from torch.nn import functional

from hf_moe_ep.sequence import recurrences, slices, states
from hf_moe_ep.sequence.recurrences import run_recurrence
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order
from hf_moe_ep.upstream.recurrences import RECURRENCES, Layout

# Two ranks cannot divide three heads. The sizes of keys, values and states differ.
ROWS, HEADS, KEYS, VALUES = 2, 3, 4, 6
# Rows have four pieces of 6 tokens, of which the last piece has 3. Chunks have 4 tokens.
LENGTH, CHUNK = 21, 4


def _make_delta_net(draw: Callable[..., Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    vectors = [draw(HEADS, width) for width in (KEYS, KEYS, VALUES)]
    gates = {"g": -functional.softplus(draw(HEADS)), "beta": draw(HEADS).sigmoid()}
    return vectors, gates | {
        "chunk_size": CHUNK,
        "initial_state": None,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": True,
    }


def _make_kda(draw: Callable[..., Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Make arguments of KDA, in which each value of a key has its own decay."""
    vectors, named = _make_delta_net(draw)
    return vectors, named | {"g": -functional.softplus(draw(HEADS, KEYS))}


def _make_mamba(draw: Callable[..., Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Make arguments of Mamba-2, in which all heads share one group of B and C."""
    per_head = draw(HEADS)[0, 0]
    positional = [draw(HEADS, VALUES), draw(HEADS), -per_head.exp(), draw(1, KEYS), draw(1, KEYS)]
    return positional, {
        "chunk_size": CHUNK,
        "D": per_head + 1,
        "z": None,
        "dt_bias": per_head / 2,
        "dt_softplus": True,
        "initial_states": None,
        "return_final_states": False,
    }


@dataclass(frozen=True)
class Kind:
    name: str
    model_type: str
    make: Callable[..., tuple[list[Tensor], dict[str, Any]]]

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function of transformers, or None if the installed version has no such function."""
        folder = f"transformers.models.{self.model_type}"
        if importlib.util.find_spec(folder) is None:
            return None
        file = importlib.import_module(f"{folder}.modeling_{self.model_type}")
        return getattr(file, self.name, None)


KINDS = {
    "delta net": Kind("torch_chunk_gated_delta_rule", "qwen3_next", _make_delta_net),
    "KDA": Kind("chunk_kimi_delta_attention", "kimi_linear", _make_kda),
    "Mamba-2": Kind("mamba2_chunk_scan", "nemotron_h", _make_mamba),
}


def states_are_passed(kind: str, zigzag: bool, rank: int, world: int) -> None:
    """Compare the output and the gradients of all arguments, and count the values sent."""
    chosen = KINDS[kind]
    recurrence, stock = RECURRENCES[chosen.name], chosen.function
    assert stock is not None
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        size = (ROWS, LENGTH, *sizes)
        return torch.randn(size, dtype=torch.float64, generator=generator)

    positional, named = chosen.make(draw)
    assert dist.group.WORLD is not None
    order = make_zigzag_order(world) if zigzag else None
    part = Slice(dist.group.WORLD, rank, world, LENGTH, order=order)
    layouts = recurrence.layouts(tuple(positional), named)
    whole = dict(enumerate(positional)) | named
    for key in layouts:
        whole[key].requires_grad_()
    own = dict(whole)
    for key, layout in layouts.items():
        x = whole[key].detach()
        own[key] = (x.clone() if layout == Layout.PER_HEAD else part.take(x, 1)).requires_grad_()
    grad = draw(HEADS, VALUES)
    sent: list[int] = []
    gather = slices.all_gather
    with FP64():
        want = _call(stock, whole)
        (want * grad).sum().backward()
        with (
            mock.patch.object(recurrences, "run_pieces", side_effect=states.run_pieces) as passed,
            mock.patch.object(
                slices, "all_gather", lambda x, group: sent.append(x.numel()) or gather(x, group)
            ),
        ):
            got = _call(partial(run_recurrence, part, recurrence, stock), own)
        (got * part.take(grad, 1)).sum().backward()
    assert passed.call_count == 1
    assert sent == [len(part.piece_numbers) * ROWS * HEADS * KEYS * (VALUES + KEYS)]
    assert_close(
        f"{kind}: out",
        _drop_padding(got, part),
        _drop_padding(part.take(want, 1), part),
        FP64_MODEL,
    )
    for key, layout in layouts.items():
        got_grad, want_grad = own[key].grad, whole[key].grad
        assert got_grad is not None and want_grad is not None
        if layout == Layout.PER_HEAD:
            dist.all_reduce(got_grad)
        else:
            got_grad, want_grad = (
                _drop_padding(got_grad, part),
                _drop_padding(part.take(want_grad, 1), part),
            )
        assert_close(f"{kind}: gradient of {key}", got_grad, want_grad, FP64_MODEL)


def _call(function: Callable[..., Any], given: dict[int | str, Any]) -> Tensor:
    named = {name: x for name, x in given.items() if isinstance(name, str)}
    out = function(*(given[i] for i in range(len(given) - len(named))), **named)
    if isinstance(out, tuple):
        out, state = out
        assert state is None
    return out


def _drop_padding(x: Tensor, part: Slice) -> Tensor:
    """Return the tokens of a slice without padding, which only the last piece has."""
    number = sum(stop - start for start, stop in part.spans)
    return x.detach()[:, :number]


ORDERS = {"zigzag": True, "in order": False}
CASES: dict[str, Any] = {
    f"{kind}, {order}": partial(states_are_passed, kind, zigzag)
    for kind, chosen in KINDS.items()
    if chosen.function is not None
    for order, zigzag in ORDERS.items()
}


@pytest.mark.parametrize("claim", on_ranks(2, CASES))
def test_states_are_passed_from_piece_to_piece(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(4, CASES))
def test_states_are_passed_over_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
