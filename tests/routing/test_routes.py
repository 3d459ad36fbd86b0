"""Arrays of engines, put in their places by hand-written examples; packing."""

from typing import Any

import numpy as np
import pytest
import torch

from hf_moe_ep import Routes

# Two sequences of 4 and 2 tokens, 2 layers, top-1: [tokens - 1, layers, K]
LONG = np.array([[[1], [11]], [[2], [12]], [[3], [13]]], dtype=np.int16)
SHORT = np.array([[[4], [14]]], dtype=np.int16)


def _first_layer(routes: Routes) -> list[list[int]]:
    return routes.ids[:, :, 0, 0].tolist()


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32, np.uint16])
@pytest.mark.parametrize(
    ("pad_side", "want"),
    [
        ("right", [[1, 2, 3, -1, -1], [4, -1, -1, -1, -1]]),
        ("left", [[-1, 1, 2, 3, -1], [-1, -1, -1, 4, -1]]),
        ((0, 2), [[1, 2, 3, -1, -1], [-1, -1, 4, -1, -1]]),  # TRL: prompts end, completions begin
    ],
)
def test_rows_of_engines_belong_to_the_tokens_that_were_forwarded(
    pad_side: Any, want: list[list[int]], dtype: Any
) -> None:
    """n tokens have n - 1 rows. The last token was sampled and routes live, as padding does."""
    arrays = [LONG.astype(dtype), SHORT.astype(dtype)]
    routes = Routes.from_engine(arrays, [4, 2], padded_to=5, pad_side=pad_side)
    assert routes.ids.dtype == torch.int16 and routes.ids.shape == (2, 5, 2, 1)
    assert _first_layer(routes) == want
    live = routes.ids == -1
    assert torch.equal(
        routes.ids[~live].view(-1, 2)[:, 1], routes.ids[~live].view(-1, 2)[:, 0] + 10
    )
    assert routes.layers == (0, 1)


def test_all_tokens_or_those_behind_a_cached_prefix() -> None:
    everything = Routes.from_engine([LONG], [3], padded_to=3, pad_side="right", layers=(0, 5))
    assert _first_layer(everything) == [[1, 2, 3]] and everything.layers == (0, 5)
    behind = Routes.from_engine([LONG], [6], padded_to=6, pad_side="right", starts=[2])
    assert _first_layer(behind) == [[-1, -1, 1, 2, 3, -1]]


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ([LONG, SHORT], {"input_lengths": [4]}, "2 arrays of routes, but 1 input_lengths"),
        (
            [LONG],
            {"input_lengths": [6]},
            "3 rows from token 0 on, but its sequence has 6",
        ),
        ([LONG], {"padded_to": 3}, "4 tokens after -1 of padding|4 tokens after 0 of padding"),
        ([LONG], {"pad_side": "both"}, "pad_side='both'"),
        ([LONG], {"layers": "moe"}, "layers='moe'"),
        ([LONG], {"layers": (1,)}, "layers names 1 layers, but the arrays have 2"),
        ([LONG[0]], {}, r"array 0 of routes is torch.int64 \(2, 1\)"),
        ([LONG, SHORT[:, :1]], {"input_lengths": [4, 2]}, r"differ in \[layers, K\]"),
        ([], {"input_lengths": []}, "no arrays of routes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    arrays: list[Any], options: dict[str, Any], message: str
) -> None:
    options = {"input_lengths": [4], "padded_to": 5, "pad_side": "right"} | options
    with pytest.raises(ValueError, match=message):
        Routes.from_engine(arrays, **options)


def test_rows_are_packed_without_their_padding() -> None:
    right = Routes.from_engine([LONG, SHORT], [4, 2], padded_to=5, pad_side="right")
    left = Routes.from_engine([LONG, SHORT], [4, 2], padded_to=5, pad_side="left")
    want = [[1, 2, 3, -1, 4, -1]]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    assert _first_layer(right.pack([4, 2])) == want
    assert _first_layer(right.pack(torch.tensor([4, 2]))) == want
    assert _first_layer(right.pack(positions)) == want
    assert _first_layer(left.pack([4, 2], pad_side="left")) == want
    assert _first_layer(right.rows(1, 2)) == [[4, -1, -1, -1, -1]]
    with pytest.raises(ValueError, match=r"2 rows of 5 tokens .* \[4, 6\]"):
        right.pack([4, 6])
    with pytest.raises(ValueError, match=r"position_ids .* not \(2, 2\)"):
        right.pack(torch.zeros(2, 2))


def test_weights_go_where_ids_go() -> None:
    """Weights stay with their ids when rows are packed, cut or sent to another device."""
    ids = torch.arange(2 * 3 * 2).view(2, 3, 1, 2)
    routes = Routes(ids, (4,), weights=ids.float() / 16, num_experts=12)
    for same in (routes.pack([3, 1]), routes.pack([2, 3], pad_side="left"), routes.rows(1, 2)):
        assert same.weights is not None
        assert torch.equal(same.weights, same.ids.float() / 16) and same.ids.numel()
        assert (same.layers, same.num_experts) == ((4,), 12)
    there = routes.to("meta")
    assert there.weights is not None
    assert there.ids.device.type == there.weights.device.type == "meta"
    assert (there.layers, there.num_experts) == ((4,), 12)
