"""Slices of sequences in zigzag order equal slices by hand, and losses of slices add up."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.tiny_models import tiny
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForTokenClassification

from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.slice_arguments import LayerArguments
from hf_moe_ep.sequence.slices import SLICE, Slice, make_zigzag_order
from hf_moe_ep.sequence.split import (
    RunningSlice,
    SplitSequence,
    TakeSlice,
    split_loss,
    split_token_loss,
)

NO_GROUP = cast(Any, None)


def make_slices(cp: int, sp: int, length: int, unit: int = 1) -> list[Slice]:
    order = make_zigzag_order(cp, sp)
    return [Slice(NO_GROUP, rank, cp * sp, length, unit, order) for rank in range(cp * sp)]


def test_the_example_of_the_docstring() -> None:
    assert [part.spans for part in make_slices(2, 1, 16)] == [[(0, 4), (12, 16)], [(4, 8), (8, 12)]]
    assert [part.spans for part in make_slices(2, 2, 16)] == [
        [(0, 2), (2, 4)],
        [(12, 14), (14, 16)],
        [(4, 6), (6, 8)],
        [(8, 10), (10, 12)],
    ]


def test_three_sp_ranks_share_two_chunks() -> None:
    """Each rank has two pieces, because three ranks divide the two chunks of a cp rank."""
    assert make_zigzag_order(2, 3) == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert [part.piece_numbers for part in make_slices(2, 3, 24)][:3] == [[0, 1], [2, 9], [10, 11]]


def test_padding_is_at_the_end_of_a_slice() -> None:
    """Rows of 5 tokens are cut into 4 pieces of 2 tokens. The last piece is only padding."""
    first, second = make_slices(2, 1, 5)
    row = torch.arange(1, 6).unsqueeze(0)
    assert first.take(row, 1, fill=-1).tolist() == [[1, 2, -1, -1]]
    assert second.take(row, 1, fill=-1).tolist() == [[3, 4, 5, -1]]
    assert second.spans == [(2, 4), (4, 5)] and first.spans == [(0, 2), (5, 5)]


def test_slices_with_and_without_padding_have_the_same_strides() -> None:
    """torch.compile guards strides. Other strides would need another graph on the last rank."""
    positions = torch.arange(5).unsqueeze(0)
    parts = [Slice(NO_GROUP, rank, 2, 5) for rank in range(2)]
    assert [part.take(positions, 1).stride() for part in parts] == [(3, 1), (3, 1)]


@pytest.mark.parametrize(("cp", "sp"), [(2, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("length", [1, 3, 16, 29])
def test_join_reverses_take(cp: int, sp: int, length: int) -> None:
    parts = make_slices(cp, sp, length)
    whole = torch.arange(1, 2 * length + 1).view(2, length, 1)
    in_turn = torch.cat([part.take(whole, 1) for part in parts], 1)
    assert torch.equal(parts[0].join(in_turn, 1), whole)
    assert torch.equal(parts[0].arrange_by_rank(whole), in_turn)


def test_slices_of_arguments_are_shared_and_keep_no_whole_tensor_alive() -> None:
    """While a layer runs, a mixer that gets whole sequences finds the whole tensor.

    FSDP2 may cast position embeddings anew for each layer.
    """
    part, layer_slice, layer = Slice(NO_GROUP, 0, 2, 8), LayerSlice(), nn.Linear(2, 2)
    hidden, whole = torch.zeros(1, 4, 2), torch.arange(16.0).view(1, 8, 2)
    shared = part.take_shared(whole, 1)
    take = TakeSlice(LayerArguments("Layer", ("x",), False), layer_slice, gets_whole=False)
    for _ in range(3):
        kwargs = {SLICE: part, "position_embeddings": (whole.bfloat16(),)}
        call = take(layer, (hidden,), kwargs)
        assert call is not None
        (own,) = call[1]["position_embeddings"]
        del kwargs
        assert torch.equal(own, whole[:, :4].bfloat16()) and part.find_whole(own) is not None
        layer_slice.end(layer)
        assert part.find_whole(own) is None
    assert len(part._shared) == 2, "the shared slice, and the latest slice"
    assert part.take_shared(whole, 1) is shared and part.find_whole(shared) is whole


def test_every_cp_rank_has_the_same_number_of_visible_keys() -> None:
    """In causal attention, query t sees t + 1 keys."""
    work = [
        sum(range(1, 65)[t] for a, b in p.spans for t in range(a, b)) for p in make_slices(4, 1, 64)
    ]
    assert len(set(work)) == 1


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_number_of_labels_may_be_a_tensor_of_one_element(is_causal: bool) -> None:
    """Both ranks have the same four logits, so the loss is twice the loss of a slice."""
    part, labels = Slice(NO_GROUP, 0, 2, 8), torch.arange(8).unsqueeze(0) % 3
    options = {"vocab_size": 3} if is_causal else {"config": SimpleNamespace(num_labels=3)}
    loss_of = partial(split_loss, ForCausalLMLoss, **{SLICE: part})
    if not is_causal:
        loss_of = partial(split_token_loss, ForTokenClassification, RunningSlice(part))
    results = []
    for count in (torch.tensor(7), torch.tensor([7])):
        logits = torch.zeros(1, 4, 3, requires_grad=True)
        with mock.patch("hf_moe_ep.sequence.slices.all_gather", lambda x, _: torch.stack([x, x])):
            loss = loss_of(logits, labels, num_items_in_batch=count, **options)
            loss.backward()
        results.append((loss.detach(), logits.grad))
    (loss, grad), (other_loss, other_grad) = results
    assert loss.ndim == 0 and torch.equal(loss, other_loss) and torch.equal(grad, other_grad)
    torch.testing.assert_close(loss, torch.tensor(3.0).log() * 2 * 4 / 7)


def test_a_forward_that_is_not_split_forgets_the_slice_of_an_interrupted_forward() -> None:
    running = RunningSlice(Slice(None, 0, 2, length=8))
    state: Any = SimpleNamespace(meshes=SimpleNamespace(ranks_per_batch=2))
    model = tiny().eval()
    split = SplitSequence(state, running, separates=False, has_mixers=False)
    assert split(model, (), {"input_ids": torch.ones(1, 8, dtype=torch.int64)}) is None
    assert running.part is None
