"""Test dispatch_chunks="auto": the estimate of a layer's time, and the choice on all ranks."""

from typing import Any

import pytest
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.parity import checkpointing, full_tensor
from support.tiny_models import batch, tiny
from torch import nn

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2
from hf_moe_ep.moe.dispatch import auto_chunks
from hf_moe_ep.moe.dispatch.auto_chunks import LayerTimes, choose_num_chunks, estimate_rows


def test_two_chunks_take_20_ms_instead_of_30_in_the_example_of_the_docstring() -> None:
    times = LayerTimes(transfer=10, latency=0, experts=10, chunk=0)
    assert times._estimate_pipeline(1, tail=0) == 30
    assert times._estimate_pipeline(2, tail=0) == 20


def test_the_last_transfer_hides_the_computation_behind_the_experts() -> None:
    times = LayerTimes(transfer=10, latency=1, experts=6, chunk=0, shared=4)
    # Forward: 11 for the rows, 6 for the experts, and 11 for the results. The last transfer hides
    # the 4 of the shared experts, but not 12.
    assert times._estimate_pipeline(1, tail=4) == 11 + 6 + 11
    assert times._estimate_pipeline(1, tail=12) == 11 + 6 + 12
    # Forward takes 28. Backward takes 11 for the gradients of the results, 6 for the experts, and
    # 14 for gradients of weights (6) and the shared experts (8), which hide the last transfer.
    assert times.estimate_seconds(1) == 28 + 11 + 6 + 14


@pytest.mark.parametrize(
    ("times", "want"),
    [
        (LayerTimes(transfer=0, latency=0, experts=10, chunk=0), 1),  # there is no transfer to hide
        (LayerTimes(transfer=10, latency=10, experts=10, chunk=0), 1),  # messages cost too much
        (LayerTimes(transfer=10, latency=0, experts=10, chunk=10), 1),  # launches cost too much
        (LayerTimes(transfer=10, latency=0, experts=0.01, chunk=0), 1),  # nothing hides it
        (LayerTimes(transfer=10, latency=0, experts=10, chunk=0), 2),
        (LayerTimes(transfer=10, latency=0, experts=40, chunk=0.001), 8),
    ],
)
def test_more_chunks_are_chosen_only_if_they_hide_more_than_they_cost(
    times: LayerTimes, want: int
) -> None:
    assert choose_num_chunks(times) == want
    assert choose_num_chunks(times, max_chunks=1) == 1


def test_estimate_rows_counts_a_token_once_per_other_rank() -> None:
    assert estimate_rows(100, top_k=1, num_ranks=2) == pytest.approx(50)
    assert estimate_rows(100, top_k=1, num_ranks=4) == pytest.approx(75)
    # Top-2 of two ranks: a quarter of the tokens has both experts on its own rank.
    assert estimate_rows(100, top_k=2, num_ranks=2) == pytest.approx(75)


def test_unknown_dispatch_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dispatch_chunks='many' is unknown; use 'auto', 1, 2"):
        ParallelConfig(dispatch_chunks="many")
    with pytest.raises(ValueError, match="dispatch_chunks"):
        ParallelConfig(dispatch_chunks=0)


def _compute_gradients(model: nn.Module, rank: int, length: int) -> dict[str, Any]:
    model.zero_grad()
    model(**batch(model, 2, length + 3 * rank, seed=rank)).loss.backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters()}


def _check_choice(use_reentrant: bool | None, rank: int, world: int) -> None:
    """Check that the second forward uses the number of chunks that the first forward has chosen.

    Fixed times replace the measured times.
    """
    stock_measure = auto_chunks._measure_layer

    def measure(*args: Any) -> LayerTimes:
        measured = stock_measure(*args)
        assert min(vars(measured).values()) >= 0 and measured.latency > 0 < measured.experts
        # Each rank returns another latency. The largest latency leads to several chunks.
        return LayerTimes(transfer=10, latency=0.5 + rank, experts=15, chunk=0)

    auto_chunks._measure_layer = measure
    try:
        auto_model, one_chunk_model = tiny(), tiny()
        if use_reentrant is not None:
            checkpointing(auto_model, use_reentrant)
        apply_ep_fsdp2(auto_model, ep_size=world, dispatch_chunks="auto")
        apply_ep_fsdp2(one_chunk_model, ep_size=world)
        state = auto_model._hf_moe_ep
        auto_model.eval()(**batch(auto_model, 2, 9))
        assert state.num_chunks is None  # the number is chosen in training only
        auto_model.train()
        for length in (9, 12):
            got = _compute_gradients(auto_model, rank, length)
            want = _compute_gradients(one_chunk_model, rank, length)
            for name, grad in want.items():
                assert_close(name, got[name], grad, FP64_MODEL)
        expected = choose_num_chunks(LayerTimes(transfer=10, latency=1.5, experts=15, chunk=0))
        assert expected > 1
        assert (state.num_chunks, state.dispatcher.num_chunks) == (expected, expected)
    finally:
        auto_chunks._measure_layer = stock_measure


def ranks_choose_the_same_number(rank: int, world: int) -> None:
    _check_choice(None, rank, world)


def ranks_choose_the_same_number_under_reentrant_checkpoints(rank: int, world: int) -> None:
    _check_choice(True, rank, world)


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        ranks_choose_the_same_number,
        ranks_choose_the_same_number_under_reentrant_checkpoints,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
