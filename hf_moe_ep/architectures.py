"""Which plan fits a model, and where its parts are.

Everything that acts on a model asks here, once, instead of searching by itself:

    parts = find_parts(model)
    parts.plan                  what `model_patches` declares for its `config.model_type`
    parts.layers                decoder layers, in order
    parts.experts               name -> experts module of every MoE layer, in order
    parts.tower                 the vision tower and whose forward runs it; None for text alone

Modules are found by the names they had before anything wrapped them, so a model that PEFT,
torch.compile or activation checkpointing has wrapped has the same parts. What wraps later, or
replaces an embedding, makes a `Parts` stale: sharding looks again.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from torch import nn

import model_patches
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.upstream.adapters import without_adapters, wraps_for_adapters
from hf_moe_ep.upstream.experts_interface import is_experts_module
from hf_moe_ep.upstream.models import input_embedding, output_head, text_config
from hf_moe_ep.upstream.module_names import stock_name
from hf_moe_ep.upstream.modules import own_children
from hf_moe_ep.upstream.towers import takes_tower_outputs


@dataclass(frozen=True)
class Tower:
    """A vision tower in its model.

    Attributes:
        module: the tower; `blocks` and their `attention` are in it.
        owner: the module whose forward runs the tower, and then `decoder`, the language model.
    """

    module: nn.Module
    owner: nn.Module
    decoder: nn.Module
    blocks: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Parts:
    """The parts of one model.

    Attributes:
        plan: what its architecture declares.
        config: the config of its language model.
        root: the model that callers call; within a PeftModel, whose forward others pass by.
        layers: decoder layers, in order; with the wrapper that checkpoints them, if any.
        experts: by name, the experts modules of all MoE layers, in order, without wrappers.
        adapted_experts: the same by the index of their decoder layer, within the wrappers of
            their adapters: what is to be sharded as one.
        attention: modules of decoder layers that call transformers' attention interface.
        final_norm: the norm in front of the head.
        causal_lm: the module that owns `head`; None without a head onto the vocabulary.
        tied: head and embedding share a parameter.
        tower: None for a model of text alone.
    """

    plan: ModelPlan
    config: Any
    root: nn.Module
    layers: tuple[nn.Module, ...]
    experts: dict[str, nn.Module]
    adapted_experts: dict[int, nn.Module]
    attention: tuple[nn.Module, ...]
    final_norm: tuple[nn.Module, ...]
    embedding: nn.Module | None
    head: nn.Module | None
    causal_lm: Any
    tied: bool
    tower: Tower | None

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return int(getattr(self.config, self.plan.num_experts))


def known_architectures() -> list[str]:
    """List the `model_type` of every architecture that `patch` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(model_patches.__path__))


def find_plan(model: nn.Module) -> tuple[ModelPlan, Any]:
    """Return what is declared about a model's architecture, and its text config."""
    model_config = getattr(model, "config", None)
    model_type = getattr(model_config, "model_type", None)
    if model_type not in known_architectures():
        raise ValueError(
            f"unknown architecture {model_type!r} ({type(model).__name__}); "
            f"known are: {', '.join(known_architectures())}"
        )
    plan = importlib.import_module(f"model_patches.{model_type}").PLAN
    return plan, text_config(model_config)


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model that is not sharded yet, and check them against its config.

    Raises:
        ValueError: an unknown architecture; not the MoE layers that the config promises; no
            vision tower where the architecture has one.
    """
    plan, config = find_plan(model)
    named = _Named(model)
    embedding, head = input_embedding(model), output_head(model)
    owners = (module for module in model.modules() if head in own_children(module))
    return Parts(
        plan=plan,
        config=config,
        root=without_adapters(model),
        layers=tuple(named.unadapted[name] for name in named.like(plan.layers)),
        experts=_find_experts(model, named, plan, config),
        adapted_experts=_adapted_experts(named, plan),
        attention=tuple(named.stock[name] for name in named.like(plan.attention)),
        final_norm=tuple(named.unadapted[name] for name in named.like(plan.final_norm)),
        embedding=embedding,
        head=head,
        causal_lm=None if head is None else next(owners, None),
        # Any of their parameters: a copy that PEFT trains stands in front of what is tied.
        tied=head is not None and embedding is not None and _share_parameters(head, embedding),
        tower=_find_tower(model, named, plan),
    )


class _Named:
    """A model's modules by their stock names, under which wrappers and wrapped stand alike.

    `outermost` has the first wrapper of each, `unadapted` the first that is none of PEFT's (but may
    checkpoint), `stock` what is within all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outermost: dict[str, nn.Module] = {}
        self.unadapted: dict[str, nn.Module] = {}
        self.stock: dict[str, nn.Module] = {}
        for wrapped_name, module in model.named_modules():
            name = stock_name(wrapped_name)
            self.outermost.setdefault(name, module)
            if not wraps_for_adapters(module):
                self.unadapted.setdefault(name, module)
                self.stock[name] = module

    def like(self, pattern: str) -> list[str]:
        """Names that match a pattern of the plan, in the model's order."""
        return [name for name in self.stock if matches(pattern, name)]


def _find_experts(
    model: nn.Module, named: _Named, plan: ModelPlan, config: Any
) -> dict[str, nn.Module]:
    experts = {name: named.stock[name] for name in named.like(plan.experts)}
    others = [name for name, module in experts.items() if not is_experts_module(module)]
    expected = plan.num_moe_layers(config)
    if len(experts) != expected or expected == 0 or others:
        raise ValueError(
            f"found {len(experts)} experts modules named '{plan.experts}' in this "
            f"{type(model).__name__}, expected {expected} from its config"
            + (f"; not of transformers' experts interface: {', '.join(others)}" if others else "")
            + f". patch() wants the model as from_pretrained returns it, with at least one MoE "
            f"layer of {plan.model_type}"
        )
    return experts


def _adapted_experts(named: _Named, plan: ModelPlan) -> dict[int, nn.Module]:
    experts = named.like(plan.experts)
    return {
        index: named.outermost[name]
        for index, layer in enumerate(named.like(plan.layers))
        for name in experts
        if name.startswith(f"{layer}.")
    }


def _find_tower(model: nn.Module, named: _Named, plan: ModelPlan) -> Tower | None:
    if plan.vision is None:
        return None
    names = named.like(plan.vision.tower)
    if not names:
        raise ValueError(
            f"found no vision tower named '{plan.vision.tower}' in this {type(model).__name__}; "
            f"patch() wants the model as from_pretrained returns it"
        )
    owner = named.stock[names[0].rpartition(".")[0]]
    if not takes_tower_outputs(owner):
        raise ValueError(
            f"{type(owner).__name__} of this transformers runs its vision tower itself; "
            f"{plan.model_type} needs transformers 5.23 or newer"
        )
    first_layer = named.like(plan.layers)[0]
    decoder, _, _ = first_layer.rpartition(".")[0].rpartition(".")
    return Tower(
        module=named.unadapted[names[0]],
        owner=owner,
        decoder=named.stock[decoder],
        blocks=tuple(named.unadapted[name] for name in named.like(plan.vision.blocks)),
        attention=tuple(named.stock[name] for name in named.like(plan.vision.attention)),
    )


def _share_parameters(one: nn.Module, other: nn.Module) -> bool:
    return not {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())
