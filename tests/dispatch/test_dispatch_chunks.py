"""dispatch_chunks="auto": the model of a layer's time, and the choice on ranks."""

from typing import Any

import pytest
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.parity import checkpointing, full_tensor
from support.tiny_models import batch, tiny
from torch import nn

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2
from hf_moe_ep.moe.dispatch import chunks
from hf_moe_ep.moe.dispatch.chunks import LayerTimes, choose_num_chunks, expected_rows


def test_the_example_of_the_docstring() -> None:
    times = LayerTimes(transfer=10, latency=0, experts=10, chunk=0)
    assert times._pipeline(1, tail=0) == 30
    assert times._pipeline(2, tail=0) == 20


def test_the_last_transfer_hides_what_is_computed_after_the_experts() -> None:
    times = LayerTimes(transfer=10, latency=1, experts=6, chunk=0, shared=4)
    # Forward: 11 there, 6 of experts, 11 back with the 4 of shared experts under it.
    assert times._pipeline(1, tail=4) == 11 + 6 + 11
    assert times._pipeline(1, tail=12) == 11 + 6 + 12
    # Backward computes gradients of weights (6) and of shared experts (8) under the last transfer.
    assert times.with_chunks(1) == 28 + 11 + 6 + 14


@pytest.mark.parametrize(
    ("times", "want"),
    [
        (LayerTimes(transfer=0, latency=0, experts=10, chunk=0), 1),  # nothing to hide
        (LayerTimes(transfer=10, latency=10, experts=10, chunk=0), 1),  # a message costs too much
        (LayerTimes(transfer=10, latency=0, experts=10, chunk=10), 1),  # so do launches
        (LayerTimes(transfer=10, latency=0, experts=0.01, chunk=0), 1),  # nothing to hide under
        (LayerTimes(transfer=10, latency=0, experts=10, chunk=0), 2),
        (LayerTimes(transfer=10, latency=0, experts=40, chunk=0.001), 8),
    ],
)
def test_a_chunk_must_hide_more_than_it_costs(times: LayerTimes, want: int) -> None:
    assert choose_num_chunks(times) == want
    assert choose_num_chunks(times, max_chunks=1) == 1


def test_rows_that_are_sent() -> None:
    assert expected_rows(100, top_k=1, num_ranks=2) == pytest.approx(50)
    assert expected_rows(100, top_k=1, num_ranks=4) == pytest.approx(75)
    # Top-2 of two ranks: a quarter of the tokens has both experts on its own rank.
    assert expected_rows(100, top_k=2, num_ranks=2) == pytest.approx(75)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dispatch_chunks='many' is unknown; use 'auto', 1, 2"):
        ParallelConfig(dispatch_chunks="many")
    with pytest.raises(ValueError, match="dispatch_chunks"):
        ParallelConfig(dispatch_chunks=0)


def _step(model: nn.Module, rank: int, length: int) -> dict[str, Any]:
    model.zero_grad()
    model(**batch(model, 2, length + 3 * rank, seed=rank)).loss.backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters()}


def _auto(use_reentrant: bool | None, rank: int, world: int) -> None:
    """The second forward uses the number of chunks, whatever this machine's times are."""
    stock = chunks._measure

    def measure(*args: Any) -> LayerTimes:
        measured = stock(*args)
        assert min(vars(measured).values()) >= 0 and measured.latency > 0 < measured.experts
        # Ranks measure different times. The longest ones say three chunks.
        return LayerTimes(transfer=10, latency=0.5 + rank, experts=15, chunk=0)

    chunks._measure = measure
    try:
        auto, one = tiny(), tiny()
        if use_reentrant is not None:
            checkpointing(auto, use_reentrant)
        apply_ep_fsdp2(auto, ep_size=world, dispatch_chunks="auto")
        apply_ep_fsdp2(one, ep_size=world)
        state = auto._hf_moe_ep
        auto.eval()(**batch(auto, 2, 9))
        assert state.num_chunks is None  # only training decides
        auto.train()
        for length in (9, 12):
            got, want = _step(auto, rank, length), _step(one, rank, length)
            for name, grad in want.items():
                assert_close(name, got[name], grad, FP64_MODEL)
        expected = choose_num_chunks(LayerTimes(transfer=10, latency=1.5, experts=15, chunk=0))
        assert expected > 1
        assert (state.num_chunks, state.dispatcher.num_chunks) == (expected, expected)
    finally:
        chunks._measure = stock


def auto(rank: int, world: int) -> None:
    _auto(None, rank, world)


def auto_under_reentrant_checkpoints(rank: int, world: int) -> None:
    _auto(True, rank, world)


@pytest.mark.parametrize("claim", on_ranks(2, auto, auto_under_reentrant_checkpoints))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
