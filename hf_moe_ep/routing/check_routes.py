"""Check that routes belong to this model, and that its routers could choose these experts.

Routes are [B, S, L, K]: rows, tokens, layers, experts per token. A choice is the K expert ids of
one token in one layer. If all K ids are -1, the choice is live: the router chooses during the
replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_moe_ep.routing.layers import RoutedLayers
from hf_moe_ep.routing.routes import LIVE, Routes

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def select_layers(routes: Routes, layers: RoutedLayers) -> tuple[Tensor, Tensor | None]:
    """Return the ids and the weights (or None) of the routed layers, in the model's order.

    Raises:
        ValueError: the shape or the number of experts does not fit this model; the message has both
            numbers. Ids are no integers, or weights no floats.
    """
    ids, weights = routes.ids, routes.weights
    if ids.ndim != 4:
        raise ValueError(f"ids of routes are [B, S, L, K], not {list(ids.shape)}")
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"ids of routes are {ids.dtype}, not integers; pass int16 or int32")
    if ids.shape[3] != layers.top_k:
        raise ValueError(
            f"routes have K={ids.shape[3]} experts per token, but routers of {layers.model_type} "
            f"choose {layers.top_k}; pass routes of a model with the same K"
        )
    if routes.num_experts not in (None, layers.num_experts):
        raise ValueError(
            f"routes of a model with {routes.num_experts} experts cannot be replayed in a model "
            f"with {layers.num_experts}; pass routes that this model recorded"
        )
    if len(routes.layers) != ids.shape[2]:
        raise ValueError(f"routes name {len(routes.layers)} layers, but ids have L={ids.shape[2]}")
    if weights is not None and (weights.shape != ids.shape or not weights.is_floating_point()):
        raise ValueError(
            f"weights of routes are {weights.dtype} {list(weights.shape)}; they must be floats "
            f"with the shape of the ids, {list(ids.shape)}"
        )
    indices = _find_layer_indices(routes.layers, layers)
    if indices != list(range(ids.shape[2])):
        ids = ids[:, :, indices]
        weights = None if weights is None else weights[:, :, indices]
    return ids, weights


def _find_layer_indices(given: tuple[int, ...], layers: RoutedLayers) -> list[int]:
    """Return the index of each routed layer in the routes; `given` has the layers of the routes."""
    # Some engines number only the MoE layers: 0, 1, .. without a gap.
    if given == tuple(range(len(given))) and len(given) == len(layers.with_experts):
        return [layers.with_experts.index(key) for key in layers.keys]
    missing = [key for key in layers.keys if key not in given]
    unknown = [key for key in given if not 0 <= key < layers.num_layers]
    if missing or unknown:
        raise ValueError(
            f"routes have L={len(given)} layers ({_abridge(given)}), and this {layers.model_type} "
            f"has {layers.num_layers} decoder layers, {len(layers.with_experts)} of them with "
            f"experts ({_abridge(layers.with_experts)}): pass routes of all decoder layers, or of "
            f"all layers with experts"
        )
    return [given.index(key) for key in layers.keys]


def _abridge(numbers: tuple[int, ...]) -> str:
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "..", *texts[-2:]])


def check_ids(ids: Tensor, layers: RoutedLayers, *, allow_live: bool, strict: bool) -> None:
    """Check every choice. Without `strict`, check only what `allow_live` forbids.

    Raises:
        ValueError: a choice has an id of -1 although `allow_live` is False. With `strict` also: an
            id is out of range; a choice has -1 for some of its experts but not for all, or has an
            expert twice.
    """
    # In uint8, -1 would equal expert 255.
    signed = ids if ids.dtype.is_signed else ids.to(torch.int16)
    if not allow_live:
        lacks_experts = (signed == LIVE).any(-1)
        problem = "has at least one id of -1, but on_missing='error' needs all experts"
        _raise_if(lacks_experts, ids, layers, problem)
    if not strict:
        return
    outside = (signed >= layers.num_experts) | (signed < LIVE)
    problem = f"has an id outside of the {layers.num_experts} experts (and not -1)"
    _raise_if(outside.any(-1), ids, layers, problem)
    live = signed == LIVE
    is_mixed = live.any(-1) != live.all(-1)
    _raise_if(is_mixed, ids, layers, "has -1 for some of its experts, but not for all")
    ordered = signed.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LIVE)
    _raise_if(twice.any(-1), ids, layers, "has an expert twice; a token of padding has -1 for all")


def _raise_if(wrong_BSL: Tensor, ids: Tensor, layers: RoutedLayers, problem: str) -> None:
    """Raise ValueError if at least one choice is wrong; the message has the first wrong choice."""
    num_wrong = int(wrong_BSL.sum())
    if not num_wrong:
        return
    row, token, index = wrong_BSL.nonzero()[0].tolist()
    raise ValueError(
        f"row {row}, token {token}, decoder layer {layers.keys[index]} of the routes, "
        f"{ids[row, token, index].tolist()}, {problem} ({num_wrong} of {wrong_BSL.numel()} "
        f"choices)"
    )
