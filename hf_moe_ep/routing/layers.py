"""Which MoE layers of a model can be told what to choose: those whose router calls `topk`.

    router     calls topk over the experts of its layer, once
    experts    one module in the layer, which is handed the choice of all tokens, in their order
    owner      the nearest module above both: within it, and nowhere else, topk is answered
               (losses call topk over experts as well)

Layers are known by their place among the decoder layers, as engines count them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_moe_ep.architectures import experts_per_token
from hf_moe_ep.plan import matches
from hf_moe_ep.state import STATE, ModelState, MoELayer
from hf_moe_ep.upstream.code import calls
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.module_names import stock_name


@dataclass(frozen=True)
class RoutedLayer:
    """One MoE layer whose choice can be recorded and replayed.

    Attributes:
        decoder_layer: its place among the decoder layers.
        index: its place among the experts modules.
        name: of its router, or of the module that chooses.
    """

    decoder_layer: int
    index: int
    name: str
    owner: nn.Module
    experts: nn.Module


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of one model.

    Attributes:
        num_layers: decoder layers, dense ones included.
        with_experts: the decoder layers that have experts; some may choose by a fixed table.
        routed: those of them whose router chooses.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    with_experts: tuple[int, ...]
    routed: tuple[RoutedLayer, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """The decoder layers that are recorded and replayed."""
        return tuple(layer.decoder_layer for layer in self.routed)


def find_routed_layers(root: Any, state: ModelState) -> RoutedLayers:
    """Find the layers of a patched model; it may be sharded, and have adapters.

    Raises:
        ValueError: routing of this architecture cannot be replayed; it says why.
    """
    plan = state.plan
    # Of wrappers and what they wrap, which have one stock name, the innermost comes last.
    named = {stock_name(name): module for name, module in root.named_modules()}
    layers = [name for name in named if matches(plan.layers, name)]
    places = {name: place for place, name in enumerate(layers)}
    routers = [name for name in named if plan.router and matches(plan.router, name)]
    found: dict[int, RoutedLayer] = {}
    with_experts: list[int] = []
    for name, experts in named.items():
        layer = vars(experts).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        of_layer = next(other for other in layers if name.startswith(f"{other}."))
        place = places[of_layer]
        if place in with_experts:
            _refuse(
                state,
                f"{of_layer} has several experts modules, each for some of the tokens, so their "
                f"rows are not the tokens of a sequence",
            )
        with_experts.append(place)
        router = next((r for r in routers if r.startswith(f"{of_layer}.")), name.rpartition(".")[0])
        if not _chooses(named[router], named, router, state.num_experts):
            continue
        owner = _common(router, name) if router in routers else router
        found[place] = RoutedLayer(place, layer.index, router, named[owner], experts)
    if not found:
        kinds = {type(named[name]).__name__ for name in routers} or {"its layers"}
        _refuse(
            state,
            f"{', '.join(sorted(kinds))} do not choose by one torch.topk over the "
            f"{state.num_experts} experts",
        )
    return RoutedLayers(
        plan.model_type,
        len(layers),
        state.num_experts,
        experts_per_token(root, plan, text_config(root.config)),
        tuple(with_experts),
        tuple(found.values()),
    )


def _chooses(
    router: nn.Module, named: Mapping[str, nn.Module], name: str, num_experts: int
) -> bool:
    """Whether a router calls topk, and has not one class more than there are experts."""
    if not calls(router, "topk"):
        return False
    inside = (module for other, module in named.items() if f"{other}.".startswith(f"{name}."))
    rows = {p.shape[0] for module in inside for p in module.parameters(recurse=False) if p.dim()}
    return num_experts in rows or num_experts + 1 not in rows


def _common(one: str, other: str) -> str:
    """Name the nearest module above two others."""
    parts: list[str] = []
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            break
        parts.append(mine)
    return ".".join(parts)


def _refuse(state: ModelState, reason: str) -> None:
    raise ValueError(
        f"routing of {state.plan.model_type} cannot be recorded or replayed: {reason}; train it "
        f"without RoutingReplay"
    )
