"""Find the MoE layers whose choice can be recorded and replayed.

Such a layer has three modules:

    router     calls topk once, over the experts of its layer
    experts    receives the choices of all tokens, in the order of the tokens; the layer has no
               other experts module
    owner      the innermost module that contains router and experts; topk is replaced only inside
               the owner, because losses call topk over experts as well

A layer is identified by its index among the decoder layers, as in inference engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_moe_ep.architectures import read_experts_per_token
from hf_moe_ep.mtp_head import find_head
from hf_moe_ep.plan import matches
from hf_moe_ep.state import STATE, ModelState, MoELayer
from hf_moe_ep.upstream.code import uses_name
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.module_names import get_stock_name, remove_names_of_copies


@dataclass(frozen=True)
class RoutedLayer:
    """One MoE layer whose choice can be recorded and replayed.

    Attributes:
        decoder_layer: the index of the layer among the decoder layers.
        index: the index of `experts` among the experts modules.
        name: the name of the router; without a router module, the name of the MoE block.
    """

    decoder_layer: int
    index: int
    name: str
    owner: nn.Module
    experts: nn.Module


@dataclass(frozen=True)
class RoutedLayers:
    """The decoder layers of one model.

    Attributes:
        num_layers: the number of decoder layers, including dense layers.
        with_experts: the decoder layers that have experts. In some of these layers a fixed table
            may choose the experts.
        keys: the decoder layers whose choice can be recorded and replayed.
        routed: the layers of `keys`; with pipeline stages, only the layers of this rank's stage.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    with_experts: tuple[int, ...]
    keys: tuple[int, ...]
    routed: tuple[RoutedLayer, ...]

    @property
    def own_keys(self) -> tuple[int, ...]:
        """The decoder layers of `routed`."""
        return tuple(layer.decoder_layer for layer in self.routed)


def find_routed_layers(root: Any, state: ModelState) -> RoutedLayers:
    """Find the layers of a patched model, which may be sharded and have adapters.

    With pipeline stages this rank has only the modules of its stage.

    Raises:
        ValueError: the routing of this architecture cannot be replayed; the message says why.
    """
    plan = state.plan
    # With pipeline stages: the layers of the whole model, or why its routing cannot be replayed.
    whole_model = None if state.stage is None else state.stage.routed
    if isinstance(whole_model, str):
        raise ValueError(whole_model)
    if plan.tied_layers:
        _refuse(state, "its layers run twice per forward, in two towers that share parameters")
    named = _map_stock_names(root)
    layers = [name for name in named if matches(plan.layers, name)]
    index_of = {name: index for index, name in enumerate(layers)}
    routers = [name for name in named if plan.router and matches(plan.router, name)]
    routed: dict[int, RoutedLayer] = {}
    with_experts: list[int] = []
    for name, experts in named.items():
        layer = vars(experts).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        if layer.may_choose_no_expert:
            _refuse(state, "its routers also choose experts that return their input")
        layer_name = next(other for other in layers if name.startswith(f"{other}."))
        index = index_of[layer_name]
        if index in with_experts:
            _refuse(
                state,
                f"{layer_name} has several experts modules, and each computes only some of the "
                f"tokens of a sequence",
            )
        with_experts.append(index)
        in_layer = (router for router in routers if router.startswith(f"{layer_name}."))
        router = next(in_layer, name.rpartition(".")[0])
        if not _chooses_by_topk(named[router], named, router, state.num_experts):
            continue
        owner = _find_common_owner(router, name) if router in routers else router
        routed[index] = RoutedLayer(index, layer.index, router, named[owner], experts)
    if whole_model is not None:
        own_layers = tuple(layer for key, layer in routed.items() if key in whole_model.keys)
        return replace(whole_model, routed=own_layers)
    if not routed:
        kinds = {type(named[name]).__name__ for name in routers} or {"its layers"}
        _refuse(
            state,
            f"{', '.join(sorted(kinds))} do not choose by one torch.topk over the "
            f"{state.num_experts} experts",
        )
    return RoutedLayers(
        model_type=plan.model_type,
        num_layers=len(layers),
        num_experts=state.num_experts,
        top_k=read_experts_per_token(root, plan, text_config(root.config)),
        with_experts=tuple(with_experts),
        keys=tuple(routed),
        routed=tuple(routed.values()),
    )


def _map_stock_names(root: nn.Module) -> dict[str, nn.Module]:
    """Map stock names to the modules of a model; a stock name is a name without wrappers.

    The layer of a head for multi-token prediction is left out, because inference engines return no
    routes of this layer.
    """
    head = find_head(root)
    modules_of_head = set() if head is None else set(head.modules())
    # A wrapper and the module inside it have the same stock name. named_modules yields the wrapper
    # first, so this dict contains the module inside. For a router in modules_to_save this module is
    # a trained copy.
    return {
        remove_names_of_copies(get_stock_name(name)): module
        for name, module in root.named_modules()
        if module not in modules_of_head
    }


def _chooses_by_topk(
    router: nn.Module, named: Mapping[str, nn.Module], name: str, num_experts: int
) -> bool:
    """Return True if a router calls topk and chooses only among the experts.

    Some routers choose among num_experts + 1 classes: the experts, and "no expert".
    """
    if not uses_name(router, "topk"):
        return False
    inside = (module for other, module in named.items() if f"{other}.".startswith(f"{name}."))
    rows = {p.shape[0] for module in inside for p in module.parameters(recurse=False) if p.dim()}
    return num_experts in rows or num_experts + 1 not in rows


def _find_common_owner(first: str, second: str) -> str:
    """Return the name of the innermost module that contains two modules."""
    parts: list[str] = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def _refuse(state: ModelState, reason: str) -> None:
    raise ValueError(
        f"routing of {state.plan.model_type} cannot be recorded or replayed: {reason}; train it "
        f"without RoutingReplay"
    )
