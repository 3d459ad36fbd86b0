"""Check that routes belong to this model, and that its router could choose every row of them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_ep.routing.layers import RoutedLayers
from hf_moe_ep.routing.routes import LIVE, Routes

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def select_layers(routes: Routes, layers: RoutedLayers) -> tuple[Tensor, Tensor | None]:
    """Select the ids, and weights if there are any, of the routed layers, in the model's order.

    Raises:
        ValueError: the shape is not that of this model's routes; the message has both numbers.
    """
    ids, weights = routes.ids, routes.weights
    if ids.ndim != 4:
        raise ValueError(f"ids of routes are [B, S, L, K], not {list(ids.shape)}")
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"ids of routes are {ids.dtype}, not integers; engines return int16")
    if ids.shape[3] != layers.top_k:
        raise ValueError(
            f"routes have K={ids.shape[3]} experts a token, and routers of {layers.model_type} "
            f"choose {layers.top_k}"
        )
    if routes.num_experts not in (None, layers.num_experts):
        raise ValueError(
            f"routes of a model with {routes.num_experts} experts cannot be replayed in one with "
            f"{layers.num_experts}: they were recorded by another model"
        )
    if len(routes.layers) != ids.shape[2]:
        raise ValueError(f"routes name {len(routes.layers)} layers and have L={ids.shape[2]}")
    if weights is not None and (weights.shape != ids.shape or not weights.is_floating_point()):
        raise ValueError(
            f"weights of routes are {weights.dtype} {list(weights.shape)}; they have to be floats "
            f"of the shape of ids, {list(ids.shape)}"
        )
    entries = _entries(routes.layers, layers)
    if entries != list(range(ids.shape[2])):
        ids = ids[:, :, entries]
        weights = None if weights is None else weights[:, :, entries]
    return ids, weights


def _entries(given: tuple[int, ...], layers: RoutedLayers) -> list[int]:
    """Return the index in `given` of each routed layer."""
    if given == tuple(range(len(given))) and len(given) == len(layers.with_experts):
        return [layers.with_experts.index(key) for key in layers.keys]
    missing = [key for key in layers.keys if key not in given]
    unknown = [key for key in given if not 0 <= key < layers.num_layers]
    if missing or unknown:
        raise ValueError(
            f"routes have L={len(given)} layers ({_some(given)}), and this {layers.model_type} has "
            f"{layers.num_layers} decoder layers, {len(layers.with_experts)} of them with experts "
            f"({_some(layers.keys)}): pass routes of all decoder layers, or of all with experts"
        )
    return [given.index(key) for key in layers.keys]


def _some(numbers: tuple[int, ...]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "..", *shown[-2:]])


def check_ids(ids: Tensor, layers: RoutedLayers, *, allow_live: bool, strict: bool) -> None:
    """Check every row; without `strict` check only that no row routes live if that is not allowed.

    Raises:
        ValueError: an id is out of range; a row has -1 for some of its experts but not for all; a
            row has an expert twice; a row routes live although `allow_live` is false.
    """
    if not allow_live:
        _raise_at((ids == LIVE).any(-1), ids, layers, "routes live and on_missing='error'")
    if not strict:
        return
    wide = ids if ids.dtype.is_signed else ids.to(torch.int16)
    outside = (wide >= layers.num_experts) | (wide < LIVE)
    _raise_at(
        outside.any(-1), ids, layers, f"is outside of the {layers.num_experts} experts (and not -1)"
    )
    live = wide == LIVE
    _raise_at(live.any(-1) != live.all(-1), ids, layers, "has -1 for some of its experts, not all")
    ordered = wide.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LIVE)
    _raise_at(
        twice.any(-1), ids, layers, "has an expert twice; padding has to be -1, which routes live"
    )


def _raise_at(wrong_BSL: Tensor, ids: Tensor, layers: RoutedLayers, what: str) -> None:
    """Raise ValueError if any row is wrong, with the first wrong row and their number."""
    number = int(wrong_BSL.sum())
    if not number:
        return
    row, token, entry = wrong_BSL.nonzero()[0].tolist()
    raise ValueError(
        f"row {row}, token {token}, decoder layer {layers.keys[entry]} of the routes, "
        f"{ids[row, token, entry].tolist()}, {what} ({number} such rows of {wrong_BSL.numel()})"
    )
