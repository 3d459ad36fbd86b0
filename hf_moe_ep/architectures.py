"""Which plan fits a model, and where its parts are.

Everything that acts on a model asks here, once, instead of searching by itself:

    parts = find_parts(model)
    parts.plan                  derived from the model, or what `model_patches` says instead
    parts.layers                decoder layers, in order
    parts.experts               name -> experts module of every MoE layer, in order
    parts.tower                 the vision tower and whose forward runs it; None for text alone

Modules are found by the names they had before anything wrapped them, so a model that PEFT,
torch.compile or activation checkpointing has wrapped has the same parts. What wraps later, or
replaces an embedding, makes a `Parts` stale: sharding looks again.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from hf_moe_ep.derive import derive_plan, is_attention, stacked_experts
from hf_moe_ep.model_patches.standard import SEQUENCE_PARALLEL
from hf_moe_ep.plan import ModelPlan, as_pattern, matches
from hf_moe_ep.upstream.adapters import parts_of_wrapper, without_adapters, wraps_for_adapters
from hf_moe_ep.upstream.experts_interface import is_experts_module
from hf_moe_ep.upstream.models import input_embedding, output_head, text_config
from hf_moe_ep.upstream.module_names import stock_name
from hf_moe_ep.upstream.modules import own_children
from hf_moe_ep.upstream.towers import takes_tower_outputs

# Fields of configs that say how many experts a token has.
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")


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
class Encoders:
    """What makes embeddings of pictures and sound in its model.

    Attributes:
        modules: towers, projectors, whatever holds parameters beside the decoder; with the
            wrappers of their adapters, if any.
        owner: the module whose forward runs them, and then `decoder`, the language model.
    """

    modules: tuple[nn.Module, ...]
    owner: nn.Module
    decoder: nn.Module


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
            their adapters: what is to be sharded as one. A layer may have several.
        attention: modules of decoder layers that call transformers' attention interface.
        final_norm: the norm in front of the head.
        causal_lm: the module that owns `head`; None without a head onto the vocabulary.
        tied: head and embedding share a parameter.
        tower: one whose blocks are units; None for a model of text alone.
        encoders: everything of the kind in all other models; None for a model of text alone.
    """

    plan: ModelPlan
    config: Any
    root: nn.Module
    layers: tuple[nn.Module, ...]
    experts: dict[str, nn.Module]
    adapted_experts: dict[int, tuple[nn.Module, ...]]
    attention: tuple[nn.Module, ...]
    final_norm: tuple[nn.Module, ...]
    embedding: nn.Module | None
    head: nn.Module | None
    causal_lm: Any
    tied: bool
    tower: Tower | None
    encoders: Encoders | None

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return stacked_experts(next(iter(self.experts.values())), self.plan)


@dataclass(frozen=True)
class Differences:
    """What `model_patches` says of an architecture, instead of what would be derived."""

    origin: str = "derived"
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    def applied(self, plan: ModelPlan) -> ModelPlan:
        """The plan with these differences, and what was tested of its architecture."""
        granted = plan.model_type in SEQUENCE_PARALLEL and not plan.mixers
        return replace(plan, origin=self.origin, sequence_parallel=granted, **self.fields)


def differences(model_type: str) -> Differences:
    """Look up what is known of an architecture beyond what can be derived."""
    name = f"hf_moe_ep.model_patches.{model_type}"
    if not model_type.isidentifier() or importlib.util.find_spec(name) is None:
        return Differences()
    said = importlib.import_module(name)
    return Differences(
        f"derived, with model_patches/{model_type}.py",
        getattr(said, "DIFFERS", {}),
        getattr(said, "REFUSED", ""),
    )


def find_plan(model: nn.Module, given: ModelPlan | None = None) -> tuple[ModelPlan, Any]:
    """Return the plan of a model that is not sharded, and its text config.

    It is the one that was `given`, else derived, with what `model_patches` says instead.

    Raises:
        ValueError: the architecture cannot be derived, or is refused, with the reason.
    """
    return _plan_of(model, _Named(model), given)


def _plan_of(model: nn.Module, named: _Named, given: ModelPlan | None) -> tuple[ModelPlan, Any]:
    model_config = getattr(model, "config", None)
    config = None if model_config is None else text_config(model_config)
    if given is not None:
        return given, config
    model_type = str(getattr(model_config, "model_type", ""))
    said = differences(model_type)
    if said.refused:
        raise ValueError(f"{type(model).__name__} ({model_type}) cannot be patched: {said.refused}")
    inner = without_adapters(model)
    prefix = next((name for name, module in model.named_modules() if module is inner), "")
    start = f"{stock_name(prefix)}." if prefix else ""
    modules = {
        name[len(start) :]: module
        for name, module in named.stock.items()
        if name.startswith(start) and name != start.rstrip(".")
    }
    plan = derive_plan(inner, {"": named.stock.get(prefix, inner)} | modules)
    return said.applied(plan), config


def find_parts(model: nn.Module, given: ModelPlan | None = None) -> Parts:
    """Find the parts of a model that is not sharded yet, and check them against its config.

    Raises:
        ValueError: an architecture that cannot be derived; not the layers that the config
            promises; modules that are not where a `given` plan says.
    """
    named = _Named(model)
    plan, config = _plan_of(model, named, given)
    if given is not None:
        _check_fits(model, named, plan, config)
    embedding, head = input_embedding(model), output_head(model)
    owners = (module for module in model.modules() if head in own_children(module))
    return Parts(
        plan=plan,
        config=config,
        root=without_adapters(model),
        layers=tuple(named.unadapted[name] for name in named.like(plan.layers)),
        experts=_find_experts(model, named, plan),
        adapted_experts=_adapted_experts(named, plan),
        attention=_find_attention(named, plan),
        final_norm=tuple(named.unadapted[name] for name in named.outermost_like(plan.final_norm)),
        embedding=embedding,
        head=head,
        causal_lm=None if head is None else next(owners, None),
        # Any of their parameters: a copy that PEFT trains stands in front of what is tied.
        tied=head is not None and embedding is not None and _share_parameters(head, embedding),
        tower=_find_tower(model, named, plan),
        encoders=_find_encoders(model, named, plan),
    )


def _check_fits(model: nn.Module, named: _Named, plan: ModelPlan, config: Any) -> None:
    """Raise where modules are not as a given plan says, or not as many as the config says."""
    kind = type(model).__name__
    for part in ("layers", "experts", "router", "attention", "final_norm"):
        pattern = getattr(plan, part)
        if (pattern or part in ("layers", "experts")) and not named.like(pattern):
            optional = "" if part in ("layers", "experts") else f", or {part}='' if it has none"
            raise ValueError(
                f"the plan says {part}='{pattern}' and this {kind} has no such module; "
                f"{named.nearest(pattern)}; say where they are, ModelPlan({part}=...){optional}"
            )
    layers = named.like(plan.layers)
    said = getattr(config, "num_hidden_layers", len(layers))
    if len(layers) != said:
        raise ValueError(
            f"the plan says layers='{plan.layers}', of which this {kind} has {len(layers)}, and "
            f"its config says num_hidden_layers = {said}; name the decoder layers alone, for "
            f"instance ModelPlan(prefix=...)"
        )
    for name, experts in _find_experts(model, named, plan).items():
        if not any(name.startswith(f"{layer}.") for layer in layers):
            raise ValueError(
                f"{name} is in none of the {len(layers)} layers '{plan.layers}' of this {kind}; "
                f"say which are, ModelPlan(layers=...), or which experts, ModelPlan(experts=...)"
            )
        _check_weights(name, experts, plan, config)


def _check_weights(name: str, experts: nn.Module, plan: ModelPlan, config: Any) -> None:
    """Raise where stacked weights are not as a given plan says, or not as the config says."""
    sizes = {n: int(p.shape[0]) for n, p in experts.named_parameters(recurse=False) if p.dim() > 1}
    missing = [weight for weight in plan.expert_weights if weight not in sizes]
    if missing:
        raise ValueError(
            f"the plan says expert_weights={plan.expert_weights} and {name} has "
            f"{', '.join(sizes) or 'none'}; name those, ModelPlan(expert_weights=...)"
        )
    num_experts = sizes[plan.expert_weights[0]]
    said = getattr(config, plan.num_experts or "", num_experts)
    if said != num_experts:
        raise ValueError(
            f"{name} holds {num_experts} experts and the config says {plan.num_experts} = {said}; "
            f"correct the config, or ModelPlan(num_experts=...), the field that says so"
        )


def experts_per_token(model: nn.Module, plan: ModelPlan, config: Any) -> int:
    """Say how many experts a token has: as its router does, or else its text config.

    Raises:
        ValueError: neither does.
    """
    for name, module in model.named_modules():
        if plan.router and matches(plan.router, stock_name(name)):
            top_k = getattr(module, "top_k", None)
            if isinstance(top_k, int):
                return top_k
    for field_name in _TOP_K:
        if isinstance(getattr(config, field_name, None), int):
            return int(getattr(config, field_name))
    raise ValueError(
        f"neither the router '{plan.router}' (top_k) nor the config of {plan.model_type} "
        f"({', '.join(_TOP_K)}) says how many experts a token has"
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
        beside: set[str] = set()
        skipped: tuple[str, ...] = ()
        for wrapped_name, module in model.named_modules():
            # Factors of adapters are no parts of the model, whatever their shapes.
            if wrapped_name in beside:
                skipped = (f"{wrapped_name}.",)
            if wrapped_name in beside or wrapped_name.startswith(skipped):
                continue
            name = stock_name(wrapped_name)
            self.outermost.setdefault(name, module)
            if wraps_for_adapters(module):
                beside |= {f"{wrapped_name}.{part}" for part in parts_of_wrapper(module)}
            else:
                self.unadapted.setdefault(name, module)
                self.stock[name] = module

    def like(self, pattern: str) -> list[str]:
        """Names that match a pattern of the plan, in the model's order."""
        return [name for name in self.stock if pattern and matches(pattern, name)]

    def nearest(self, pattern: str) -> str:
        """Say which modules have a name like a pattern that fits none."""
        starred = dict.fromkeys(map(as_pattern, self.stock))
        near = get_close_matches(pattern, starred, n=3, cutoff=0.4)
        return f"it has {', '.join(near)}" if near else f"its modules are {', '.join(starred)}"

    def outermost_like(self, pattern: str) -> list[str]:
        """Return the name that matches with the fewest components, none or one."""
        return sorted(self.like(pattern), key=lambda name: name.count("."))[:1]


def _find_experts(model: nn.Module, named: _Named, plan: ModelPlan) -> dict[str, nn.Module]:
    experts = {name: named.stock[name] for name in named.like(plan.experts)}
    others = [name for name, module in experts.items() if not is_experts_module(module)]
    if others:
        derived = "" if plan.origin == "given" else "derived "
        raise ValueError(
            f"the {derived}plan says experts='{plan.experts}' and in this {type(model).__name__} "
            f"these are not of transformers' experts interface (use_experts_implementation): "
            f"{', '.join(others)}; say which are, ModelPlan(experts=...)"
        )
    return experts


def _find_attention(named: _Named, plan: ModelPlan) -> tuple[nn.Module, ...]:
    """Modules of the plan's name; of a derived plan's those alone that call the interface."""
    found = (named.stock[name] for name in named.like(plan.attention))
    return tuple(m for m in found if plan.origin == "given" or is_attention(m))


def _adapted_experts(named: _Named, plan: ModelPlan) -> dict[int, tuple[nn.Module, ...]]:
    experts = named.like(plan.experts)
    of_layers = {
        index: tuple(named.outermost[name] for name in experts if name.startswith(f"{layer}."))
        for index, layer in enumerate(named.like(plan.layers))
    }
    return {index: modules for index, modules in of_layers.items() if modules}


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
            f"{type(owner).__name__} of this transformers runs its vision tower itself, so a plan "
            f"with vision= does not fit; leave out plan=, and '{plan.vision.tower}' is gathered as "
            f"a whole, or install a newer transformers"
        )
    return Tower(
        module=named.unadapted[names[0]],
        owner=owner,
        decoder=named.stock[_name_of_decoder(named, plan)],
        blocks=tuple(named.unadapted[name] for name in named.like(plan.vision.blocks)),
        attention=tuple(named.stock[name] for name in named.like(plan.vision.attention)),
    )


def _find_encoders(model: nn.Module, named: _Named, plan: ModelPlan) -> Encoders | None:
    if not plan.encoders:
        return None
    names = [name for pattern in plan.encoders for name in named.outermost_like(pattern)]
    if len(names) < len(plan.encoders):
        raise ValueError(
            f"found {len(names)} of the modules {', '.join(map(repr, plan.encoders))} in this "
            f"{type(model).__name__}; the plan has to say where they are: ModelPlan(encoders=...)"
        )
    decoder = _name_of_decoder(named, plan)
    owner = decoder
    while not all(name.startswith(f"{owner}.") for name in names) and owner:
        owner = owner.rpartition(".")[0]
    return Encoders(
        modules=tuple(named.outermost[name] for name in names),
        owner=named.stock[owner],
        decoder=named.stock[decoder],
    )


def _name_of_decoder(named: _Named, plan: ModelPlan) -> str:
    return named.like(plan.layers)[0].rpartition(".")[0].rpartition(".")[0]


def _share_parameters(one: nn.Module, other: nn.Module) -> bool:
    return not {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters())
