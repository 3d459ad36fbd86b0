"""Compare calls of stock attention code that context parallelism plans with calls by hand.

Rows have 8 tokens. Of two cp ranks, rank 0 has the tokens 0-1 and 6-7, and rank 1 the tokens 2-5.
"""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.architectures import tiny as tiny_of
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils.flop_counter import FlopCounterMode

from hf_moe_ep.sequence.context import _FetchPieces, _list_pieces, _PieceExchange
from hf_moe_ep.sequence.context_calls import MODULE_PATH, Call, plan_calls
from hf_moe_ep.sequence.kv_exchange import list_key_value_exchanges
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order

LENGTH = 8
CPU = torch.device("cpu")


def make_module(implementation: str, *, is_causal: bool = True) -> Any:
    config = SimpleNamespace(_attn_implementation=implementation)
    return SimpleNamespace(config=config, is_causal=is_causal, **{MODULE_PATH: "layer3"})


def make_slice(rank: int = 0, length: int = LENGTH) -> Slice:
    return Slice(cast(Any, None), rank, 2, length, order=make_zigzag_order(2))


def plan(implementation: str, mask: Any = None, rows: int = 1, **kwargs: Any) -> list[list[Call]]:
    causal = kwargs.pop("causal", True)
    module = make_module(implementation, is_causal=causal)
    return plan_calls(module, mask, make_slice(), kwargs, rows, CPU)


def list_ranges(calls: list[list[Call]]) -> list[list[tuple[int, int, int, int]]]:
    return [[(c.start, c.stop, c.first, c.last) for c in rank_calls] for rank_calls in calls]


CAUSAL = [[(0, 2, 0, 2), (6, 8, 0, 8)], [(2, 4, 0, 4), (4, 6, 0, 6)]]
ALL_KEYS = [[(0, 2, 0, 8), (6, 8, 0, 8)], [(2, 4, 0, 8), (4, 6, 0, 8)]]


def test_attention_without_a_mask_gets_the_rows_of_a_causal_mask() -> None:
    calls = plan("sdpa")
    assert list_ranges(calls) == CAUSAL
    assert calls[0][0].mask is None, "as many queries as keys: stock code masks them itself"
    with FlopCounterMode(display=False):  # a dispatch mode
        bias = calls[1][0].mask
    assert isinstance(bias, CausalBias) and bias.variant == CausalVariant.LOWER_RIGHT
    assert (bias.seq_len_q, bias.seq_len_kv) == (2, 4)
    others = plan("of_mine")
    assert list_ranges(others) == CAUSAL and others[0][0].mask is None
    assert cast(Tensor, others[1][0].mask).int().tolist() == [[[[1, 1, 1, 0], [1, 1, 1, 1]]]]
    assert list_ranges(plan("sdpa", causal=False)) == ALL_KEYS
    assert plan("sdpa", causal=False)[1][1].mask is None
    assert list_ranges(plan("sdpa", is_causal=False)) == ALL_KEYS
    assert list_ranges(plan("eager")) == ALL_KEYS


def test_a_call_gets_the_keys_from_the_first_to_the_last_visible_one() -> None:
    """The mask is a window of 3 tokens, as booleans or as numbers that are added to the scores."""
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2)[None, None]
    numbers = torch.zeros(window.shape).masked_fill(~window, torch.finfo(torch.float32).min)
    for mask in (window, numbers):
        calls = plan("sdpa", mask)
        assert list_ranges(calls) == [
            [(0, 2, 0, 2), (6, 8, 4, 8)],
            [(2, 4, 0, 4), (4, 6, 2, 6)],
        ]
        for call in (call for rank_calls in calls for call in rank_calls):
            want = mask[:, :, call.start : call.stop, call.first : call.last]
            assert torch.equal(call.mask, want)


def test_a_query_that_sees_nothing_gets_all_keys() -> None:
    """The first token is padding. Stock code may return the mean of all values for this token."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].clone()
    mask[..., 0] = False
    calls = plan("sdpa", mask)
    assert list_ranges(calls) == [[(0, 2, 0, 8), (6, 8, 1, 8)], [(2, 4, 1, 4), (4, 6, 1, 6)]]


def test_a_mask_with_one_row_holds_for_all_queries() -> None:
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]).bool().view(1, 1, 1, LENGTH)
    calls = plan("sdpa", mask, causal=False)
    assert list_ranges(calls)[1] == [(2, 4, 0, 5), (4, 6, 0, 5)]
    assert calls[1][0].mask.shape == (1, 1, 2, 5)


def test_block_masks_of_calls_have_the_function_of_the_whole_mask() -> None:
    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < 3)

    mask = create_block_mask(window, 1, 1, LENGTH, LENGTH, device="cpu")
    whole = create_mask(window, 1, 1, LENGTH, LENGTH, device="cpu")
    for call in (call for rank_calls in plan("flex_attention", mask) for call in rank_calls):
        assert isinstance(call.mask, BlockMask) and call.mask.shape == (1, 1, 2, LENGTH)
        rows = create_mask(call.mask.mask_mod, 1, 1, 2, LENGTH, device="cpu")
        assert torch.equal(rows, whole[:, :, call.start : call.stop])


def test_flash_attention_aligns_the_last_query_with_the_last_key() -> None:
    assert list_ranges(plan("flash_attention_2")) == CAUSAL
    windows = [[(0, 2, 0, 2), (6, 8, 4, 8)], [(2, 4, 0, 4), (4, 6, 2, 6)]]
    assert list_ranges(plan("flash_attention_2", sliding_window=3)) == windows
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]])
    calls = plan("flash_attention_2", padding, sliding_window=3)
    assert list_ranges(calls) == windows and calls[0][1].mask.tolist() == [[1, 1, 1, 0]]


def test_flash_attention_gets_the_documents_of_its_queries() -> None:
    """The documents have 3, 4 and 1 tokens. The first piece of rank 1 has the tokens 2 | 3."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    ends = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    for kwargs in ({"position_ids": positions}, {"cu_seq_lens_q": ends, "max_length_q": 4}):
        calls = plan("flash_attention_2", **kwargs)
        assert list_ranges(calls) == [[(0, 2, 0, 2), (6, 8, 3, 8)], [(2, 4, 0, 4), (4, 6, 3, 6)]]
        lengths = [
            [(c.kwargs[f"cu_seq_lens_{x}"].tolist(), c.kwargs[f"max_length_{x}"]) for x in "qk"]
            for rank_calls in calls
            for c in rank_calls
        ]
        assert lengths == [
            [([0, 2], 2), ([0, 2], 2)],
            [([0, 1, 2], 1), ([0, 4, 5], 4)],
            [([0, 1, 2], 1), ([0, 3, 4], 3)],
            [([0, 2], 2), ([0, 3], 3)],
        ]
        assert "position_ids" not in calls[0][0].kwargs
    gap = torch.tensor([[0, 1, 2, 3, 10, 11, 12, 13]])  # flash attention finds one document
    assert list_ranges(plan("flash_attention_2", position_ids=gap)) == CAUSAL
    in_window = plan("flash_attention_2", position_ids=positions, sliding_window=2)
    assert list_ranges(in_window) == [[(0, 2, 0, 2), (6, 8, 5, 8)], [(2, 4, 1, 4), (4, 6, 3, 6)]]
    assert in_window[0][1].kwargs["cu_seq_lens_k"].tolist() == [0, 2, 3]


def test_queries_are_padded_if_flash_attention_is_not_causal() -> None:
    options: dict[str, Any] = {"causal": False, "sliding_window": 2}
    calls = plan("flash_attention_2", **options)
    assert list_ranges(calls) == [[(0, 2, 0, 3), (6, 8, 5, 8)], [(2, 4, 1, 5), (4, 6, 3, 7)]]
    assert all(call.pads_queries for rank_calls in calls for call in rank_calls)
    assert not plan("flash_attention_2", causal=False)[0][0].pads_queries


def test_arguments_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer3 adds a position_bias .* cp_size=2 does not"):
        plan("sdpa", position_bias=torch.zeros(1, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match=r"layer3 \(shape \(1, 8\)\) has no row for each query"):
        plan("sdpa", torch.ones(1, LENGTH))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    with pytest.raises(ValueError, match=r"the batch has 2 rows with packed documents"):
        plan("flash_attention_2", rows=2, position_ids=positions)


def test_a_window_needs_only_the_pieces_in_front() -> None:
    """The rank of piece n sends it to the rank of piece n + 1.

    Rows of 64 tokens have 8 pieces, and a window of 5 tokens reaches into the previous piece:
    pieces 0 -> rank 1, 1 -> 2, 2 -> 3, 4 -> 2, 5 -> 1, 6 -> 0.
    """
    whole = Slice(cast(Any, None), 0, 4, 64, order=make_zigzag_order(4))
    module = make_module("flash_attention_2")
    calls = plan_calls(module, None, whole, {"sliding_window": 5}, 1, CPU)
    needed = [_list_pieces(rank_calls, 8) for rank_calls in calls]
    assert needed == [[0, 6, 7], [0, 1, 5, 6], [1, 2, 4, 5], [2, 3, 4]]
    sent = []
    for rank in range(4):
        part = Slice(cast(Any, None), rank, 4, 64, order=make_zigzag_order(4))
        exchange = _PieceExchange(part, needed, CPU)
        to_others = [n for r, n in enumerate(exchange.send_counts) if r != rank]
        sent.append(sum(to_others))
    assert sent == [1, 2, 2, 1]


def test_pieces_are_sent_to_the_ranks_that_need_them() -> None:
    """With a window of 3, rank 0 needs the pieces 0, 2 and 3, and rank 1 needs 0, 1 and 2."""
    needed = [_list_pieces(calls, 2) for calls in plan("flash_attention_2", sliding_window=3)]
    assert needed == [[0, 2, 3], [0, 1, 2]]
    first, second = (_PieceExchange(make_slice(rank), needed, CPU) for rank in (0, 1))
    assert first.sent.tolist() == [0, 1, 0], "pieces 0 and 3 to itself, and piece 0 to rank 1"
    assert second.sent.tolist() == [1, 0, 1], "piece 2 to rank 0, and pieces 1 and 2 to itself"
    # Rank 0 receives 0, 3 and 2; rank 1 receives 0, 1 and 2.
    assert first.ascending.tolist() == [0, 2, 1] and second.ascending.tolist() == [0, 1, 2]


def test_indices_of_pieces_are_on_the_device_of_the_keys() -> None:
    """Fake tensors check the devices of all arguments. Nothing is sent.

    A build of torch without CUDA cannot index fake CUDA tensors, so the test uses "meta" instead.
    """
    needed = [[0, 2, 3], [0, 1, 2]]
    sent = mock.patch("hf_moe_ep.sequence.context.start_all_to_all")
    with sent, FakeTensorMode(allow_non_fake_inputs=True):
        keys = torch.empty(1, 4, 3, 16, device="meta", requires_grad=True)
        received = _FetchPieces.apply(keys, make_slice(), needed)
        assert received.shape == (1, 6, 3, 16)
        (grad,) = torch.autograd.grad(received, keys, torch.empty_like(received))
    assert grad.shape == keys.shape


def test_layers_of_one_kind_share_the_indices_of_their_pieces() -> None:
    """When an index is made on a GPU, the host waits for all earlier kernels."""
    part, needed = make_slice(), [[0, 2, 3], [0, 1, 2]]
    make = mock.patch("hf_moe_ep.sequence.context._PieceExchange", wraps=_PieceExchange)
    with mock.patch("hf_moe_ep.sequence.context.start_all_to_all"), make as made:
        for _ in range(3):
            _FetchPieces.apply(torch.zeros(1, 4, 3, 16), part, needed)
    assert made.call_count == 1


def test_a_layer_without_a_window_is_listed_without_one() -> None:
    """EXAONE stores the window of the config in all layers."""
    model = tiny_of("exaone_moe", layer_types=["sliding_attention", "full_attention"] * 2)
    named = [(n, m) for n, m in model.named_modules() if n.endswith("self_attn")]
    windows = [exchange.window for exchange in list_key_value_exchanges(named, 1)]
    assert windows == [model.config.sliding_window, None]
