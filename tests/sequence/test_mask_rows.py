"""With cp_size > 1 a rank builds only its own rows of the stock masks, in as many bytes."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.largest_tensor import LargestTensor
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, masking_utils

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.sequence.mask_rows import MaskRows
from hf_moe_ep.sequence.slices import Slice, make_zigzag_order
from hf_moe_ep.upstream.attention_interface import make_mask_config

ROWS = 3
causal = masking_utils.create_causal_mask
# These functions have an argument for a cache, whose name differs between versions.
WITHOUT_CACHE = {n: None for n in ("cache", "past_key_values") if n in signature(causal).parameters}


def _make_padding(length: int) -> Tensor:
    """Make a mask whose first row begins with padding, and whose second row ends with padding."""
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    mask[0, :2] = 0
    mask[1, -3:] = 0
    return mask


def _make_ones(length: int) -> Tensor:
    return torch.ones(ROWS, length, dtype=torch.int64)


def _sees_token_1(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k == 1) & (q >= 0)


# For each kind, the function of masking_utils, and a function that makes its arguments.
KINDS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "causal, padded": ("causal", lambda n: {"attention_mask": _make_padding(n)}),
    "causal, mask of ones": ("causal", lambda n: {"attention_mask": _make_ones(n)}),
    "causal": ("causal", lambda n: {}),
    "window, padded": ("sliding_window_causal", lambda n: {"attention_mask": _make_padding(n)}),
    "window": ("sliding_window_causal", lambda n: {}),
    "packed": (
        "causal",
        lambda n: {"position_ids": (torch.arange(n) % (n // 2 + 1)).expand(ROWS, -1)},
    ),
    "own function": ("causal", lambda n: {"or_mask_function": _sees_token_1}),
    "never left out": ("causal", lambda n: {"allow_is_causal_skip": False}),
    "not causal": ("bidirectional", lambda n: {}),
    "not causal, padded": ("bidirectional", lambda n: {"attention_mask": _make_padding(n)}),
}


def _make_config(stock: str = "sdpa") -> Qwen3MoeConfig:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    return Qwen3MoeConfig(**window, attn_implementation=stock)


def _make_slice(rank: int, cp: int, length: int) -> Slice:
    part = Slice(None, rank, cp, length, order=make_zigzag_order(cp))
    part.cp_slice = Slice(None, rank, cp, length, order=make_zigzag_order(cp))
    return part


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cp", "length"), [(2, 16), (4, 13), (4, 5), (3, 12)])
def test_rows_equal_those_of_the_stock_mask(kind: str, stock: str, cp: int, length: int) -> None:
    config = _make_config(stock)
    rows = MaskRows()
    view = make_mask_config(config, rows)
    name, make = KINDS[kind]
    create = getattr(masking_utils, f"create_{name}_mask")
    given = {"attention_mask": None} | make(length)
    if name != "bidirectional":
        given |= WITHOUT_CACHE
    embeds = torch.zeros(ROWS, length, 2)
    want, own = (create(x, embeds, **given) for x in (config, view))
    assert want is None is own or torch.equal(want, own)
    for rank in range(cp):
        rows.part = _make_slice(rank, cp, length)
        context = rows.part.cp_slice
        assert context is not None
        got = create(view, embeds, **given)
        assert context.has_mask_rows == (want is not None)
        if want is None:
            assert got is None
            continue
        assert got.shape == (ROWS, 1, context.local_length, length) and got.dtype == want.dtype
        for index, (start, stop) in enumerate(context.spans):
            first = index * context.piece_length
            assert torch.equal(got[:, :, first : first + stop - start], want[:, :, start:stop])


def test_a_piece_gets_rows_even_if_it_alone_would_need_no_mask() -> None:
    """All tokens behind the first piece of 4 tokens are padding.

    The first piece alone would therefore need only a causal mask.
    """
    rows = MaskRows()
    rows.part = _make_slice(0, 2, 16)
    view, embeds = make_mask_config(_make_config(), rows), torch.zeros(ROWS, 16, 2)
    mask = (torch.arange(16) < 4).expand(ROWS, -1)
    got = causal(view, embeds, attention_mask=mask, **WITHOUT_CACHE)
    want = causal(_make_config(), embeds, attention_mask=mask, **WITHOUT_CACHE)
    assert torch.equal(got, torch.cat([want[:, :, :4], want[:, :, 12:]], 2))


def test_no_whole_mask_is_built_temporarily() -> None:
    rows = MaskRows()
    rows.part = _make_slice(1, 4, 256)
    view, embeds = make_mask_config(_make_config(), rows), torch.zeros(ROWS, 256, 2)
    with LargestTensor([]) as largest:
        causal(view, embeds, attention_mask=_make_padding(256), **WITHOUT_CACHE)
    assert largest.nbytes == ROWS * 64 * 256


def test_masks_with_a_cache_or_of_another_length_stay_whole() -> None:
    rows = MaskRows()
    view = make_mask_config(_make_config(), rows)
    rows.part = _make_slice(0, 2, 16)
    masks = [
        causal(view, torch.zeros(3, n, 2), attention_mask=mask, **WITHOUT_CACHE)
        for n, mask in ((12, _make_padding(12)), (8, _make_padding(16)))
    ]
    assert [tuple(mask.shape) for mask in masks] == [(3, 1, 12, 12), (3, 1, 8, 16)]


def test_a_view_shares_the_attributes_of_its_config() -> None:
    config = _make_config()
    rows = MaskRows()
    view = make_mask_config(config, rows)
    config.use_cache = False
    view.output_router_logits = True
    assert view.use_cache is False and config.output_router_logits is True
    assert isinstance(view, type(config)) and view.to_dict() == config.to_dict()
    other = deepcopy(view)
    assert other.to_dict() == config.to_dict()


def test_a_view_names_our_masks_only_in_split_forwards() -> None:
    """Gemma-4 cuts queries if the name is not "sdpa", which would be wrong in other forwards."""
    config, rows = _make_config(), MaskRows()
    view = make_mask_config(config, rows)
    assert view._attn_implementation == "sdpa"
    rows.part = _make_slice(0, 2, 16)
    assert view._attn_implementation != "sdpa" == config._attn_implementation
    # A copy of a model has its own slice.
    other = deepcopy(view)
    rows.part = None
    assert other._attn_implementation != "sdpa" == view._attn_implementation


def test_unpatch_restores_the_config() -> None:
    model = tiny()
    inner = model.model
    patch(model, cp_size=2)
    assert inner.config is not model.config
    unpatch(model)
    assert inner.config is model.config and not inner._forward_hooks_always_called


def masks_of_a_rank_have_its_rows(rank: int, world: int) -> dict[str, int]:
    """Measure the bytes of the masks of a padded batch of 3 rows of 256 tokens."""
    model = apply_ep_fsdp2(tiny(seed=rank), ep_size=2, cp_size=2)
    micro = batch(model, 3, 256, pad=30)
    found: dict[str, int] = {}
    stock = mock.patch.object(MaskRows, "__call__", lambda self, stock, **kw: stock(**kw))
    for kind in ("stock", "rows"):
        masks: list[Tensor] = []

        def keep(layer: nn.Module, args: Any, kwargs: dict[str, Any], masks: Any = masks) -> None:
            masks.append(kwargs["attention_mask"])

        hook = model.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        with stock if kind == "stock" else nullcontext():
            model(**micro, use_cache=False).loss.backward()
        hook.remove()
        found[kind] = masks[0].untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("claim", on_ranks(2, masks_of_a_rank_have_its_rows))
def test_masks_of_a_padded_batch_have_half_the_bytes(found: Found, claim: Check) -> None:
    for mask_bytes in found.values(claim):
        assert mask_bytes["stock"] == 3 * 256 * 256
        assert mask_bytes["rows"] == 3 * 128 * 256
