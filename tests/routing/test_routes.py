"""`Routes.from_engine` assigns rows of engines' arrays to tokens, and `pack` removes padding."""

from typing import Any

import numpy as np
import pytest
import torch

from hf_moe_ep import Routes

# The arrays of two sequences of 4 and 2 tokens, with 2 layers and top-1: [tokens - 1, layers, K].
LONG = np.array([[[1], [11]], [[2], [12]], [[3], [13]]], dtype=np.int16)
SHORT = np.array([[[4], [14]]], dtype=np.int16)


def _list_ids_of_first_layer(routes: Routes) -> list[list[int]]:
    return routes.ids[:, :, 0, 0].tolist()


def test_routes_are_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        routes = Routes.from_engine([LONG, SHORT], [4, 2], padded_to=5, pad_side="right")
    assert _list_ids_of_first_layer(routes) == [[1, 2, 3, -1, -1], [4, -1, -1, -1, -1]]


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int32, np.uint16])
@pytest.mark.parametrize(
    ("pad_side", "want"),
    [
        ("right", [[1, 2, 3, -1, -1], [4, -1, -1, -1, -1]]),
        ("left", [[-1, 1, 2, 3, -1], [-1, -1, -1, 4, -1]]),
        (
            (0, 2),
            [[1, 2, 3, -1, -1], [-1, -1, 4, -1, -1]],
        ),  # TRL pads prompts left, completions right
    ],
)
def test_rows_of_arrays_belong_to_the_tokens_that_the_engine_ran(
    pad_side: Any, want: list[list[int]], dtype: Any
) -> None:
    """An array has n - 1 rows for n tokens, because an engine does not run the last sampled token.

    This token and padding route live.
    """
    arrays = [LONG.astype(dtype), SHORT.astype(dtype)]
    routes = Routes.from_engine(arrays, [4, 2], padded_to=5, pad_side=pad_side)
    assert routes.ids.dtype == torch.int16 and routes.ids.shape == (2, 5, 2, 1)
    assert _list_ids_of_first_layer(routes) == want
    live = routes.ids == -1
    assert torch.equal(
        routes.ids[~live].view(-1, 2)[:, 1], routes.ids[~live].view(-1, 2)[:, 0] + 10
    )
    assert routes.layers == (0, 1)


def test_arrays_may_have_all_tokens_or_the_tokens_after_a_cached_prefix() -> None:
    all_tokens = Routes.from_engine([LONG], [3], padded_to=3, pad_side="right", layers=(0, 5))
    assert _list_ids_of_first_layer(all_tokens) == [[1, 2, 3]] and all_tokens.layers == (0, 5)
    after_prefix = Routes.from_engine([LONG], [6], padded_to=6, pad_side="right", starts=[2])
    assert _list_ids_of_first_layer(after_prefix) == [[-1, -1, 1, 2, 3, -1]]


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


def test_pack_removes_padding() -> None:
    right = Routes.from_engine([LONG, SHORT], [4, 2], padded_to=5, pad_side="right")
    left = Routes.from_engine([LONG, SHORT], [4, 2], padded_to=5, pad_side="left")
    want = [[1, 2, 3, -1, 4, -1]]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    assert _list_ids_of_first_layer(right.pack([4, 2])) == want
    assert _list_ids_of_first_layer(right.pack(torch.tensor([4, 2]))) == want
    assert _list_ids_of_first_layer(right.pack(positions)) == want
    assert _list_ids_of_first_layer(left.pack([4, 2], pad_side="left")) == want
    assert _list_ids_of_first_layer(right.rows(1, 2)) == [[4, -1, -1, -1, -1]]
    with pytest.raises(ValueError, match=r"2 rows of 5 tokens .* \[4, 6\]"):
        right.pack([4, 6])
    with pytest.raises(ValueError, match=r"position_ids .* not \(2, 2\)"):
        right.pack(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"start at 0 .* the first one is 1"):
        right.pack(positions[:, 1:])


def test_weights_stay_with_their_ids() -> None:
    """Routes are packed, rows are selected, and routes are copied to another device."""
    ids = torch.arange(2 * 3 * 2).view(2, 3, 1, 2)
    routes = Routes(ids, (4,), weights=ids.float() / 16, num_experts=12)
    for result in (routes.pack([3, 1]), routes.pack([2, 3], pad_side="left"), routes.rows(1, 2)):
        assert result.weights is not None
        assert torch.equal(result.weights, result.ids.float() / 16) and result.ids.numel()
        assert (result.layers, result.num_experts) == ((4,), 12)
    on_meta = routes.to("meta")
    assert on_meta.weights is not None
    assert on_meta.ids.device.type == on_meta.weights.device.type == "meta"
    assert (on_meta.layers, on_meta.num_experts) == ((4,), 12)


def test_a_copy_to_the_host_is_finished_when_to_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a GPU with `non_blocking=True` returns before the ids are in host memory."""
    non_blocking = []
    stock = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        non_blocking.append(kwargs.get("non_blocking", False))
        return stock(self, *args, **kwargs)

    routes = Routes(torch.zeros(1, 2, 1, 2, dtype=torch.int16), (0,), torch.ones(1, 2, 1, 2))
    monkeypatch.setattr(torch.Tensor, "to", to)
    routes.to("cpu")
    routes.to(torch.device("cpu"))
    assert non_blocking == [False] * 4
    routes.to("meta")
    assert non_blocking[4:] == [True] * 2
