"""Find the MoE layers whose choice can be recorded and replayed: their router calls `topk`.

    router     calls topk over the experts of its layer, once
    experts    one module in the layer, which gets the choice of all tokens, in their order
    owner      the nearest module that contains both; topk is replaced only inside of it (losses
               call topk over experts as well)

A layer is identified by its index among the decoder layers, as inference engines count them.
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
        decoder_layer: its index among the decoder layers.
        index: its index among the experts modules.
        name: the name of its router, or of the module that chooses.
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
        num_layers: the number of decoder layers, including dense ones.
        with_experts: the decoder layers that have experts; some may choose by a fixed table.
        routed: the layers whose router chooses.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    with_experts: tuple[int, ...]
    routed: tuple[RoutedLayer, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """The indices of the decoder layers that are recorded and replayed."""
        return tuple(layer.decoder_layer for layer in self.routed)


def find_routed_layers(root: Any, state: ModelState) -> RoutedLayers:
    """Find the layers of a patched model, which may be sharded and have adapters.

    Raises:
        ValueError: the routing of this architecture cannot be replayed; the message says why.
    """
    plan = state.plan
    # A wrapper and the module that it wraps have one stock name; the wrapped module comes last.
    named = {stock_name(name): module for name, module in root.named_modules()}
    layers = [name for name in named if matches(plan.layers, name)]
    index_of = {name: index for index, name in enumerate(layers)}
    routers = [name for name in named if plan.router and matches(plan.router, name)]
    found: dict[int, RoutedLayer] = {}
    with_experts: list[int] = []
    for name, experts in named.items():
        layer = vars(experts).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        of_layer = next(other for other in layers if name.startswith(f"{other}."))
        index = index_of[of_layer]
        if index in with_experts:
            _refuse(
                state,
                f"{of_layer} has several experts modules, each for some of the tokens, so their "
                f"rows are not the tokens of a sequence",
            )
        with_experts.append(index)
        router = next((r for r in routers if r.startswith(f"{of_layer}.")), name.rpartition(".")[0])
        if not _chooses(named[router], named, router, state.num_experts):
            continue
        owner = _common(router, name) if router in routers else router
        found[index] = RoutedLayer(index, layer.index, router, named[owner], experts)
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
    """Return whether a router calls topk, and chooses among the experts alone.

    Some routers have one more class than experts, which stands for "no expert".
    """
    if not calls(router, "topk"):
        return False
    inside = (module for other, module in named.items() if f"{other}.".startswith(f"{name}."))
    rows = {p.shape[0] for module in inside for p in module.parameters(recurse=False) if p.dim()}
    return num_experts in rows or num_experts + 1 not in rows


def _common(one: str, other: str) -> str:
    """Return the name of the nearest module that contains two others."""
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
