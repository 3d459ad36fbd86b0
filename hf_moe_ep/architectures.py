"""Find the plan of a model, and the modules that the plan describes.

`Parts` lists the modules, so that other files need not know how an architecture names them:

    parts = find_parts(model)
    parts.plan                  the plan, derived from the model and changed by `model_patches`
    parts.layers                the decoder layers, in order
    parts.experts               name -> experts module of every MoE layer, in order
    parts.tower                 the vision tower and the module whose forward runs it, or None

Modules are found by their stock names, without the components that wrappers add. A model that PEFT,
torch.compile or activation checkpointing has wrapped therefore has the same parts. If a module is
wrapped or an embedding is replaced later, the `Parts` are out of date, so sharding calls
`find_parts` again.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from hf_moe_ep.derive import (
    count_stacked_experts,
    derive_plan,
    is_attention,
    is_mixer,
    takes_chosen_tokens,
)
from hf_moe_ep.model_patches.standard import (
    CONTEXT_PARALLEL,
    GATHERS_KEYS,
    SEQUENCE_PARALLEL,
    SPLITS_MIXERS,
)
from hf_moe_ep.mtp_head import MtpHead, find_head
from hf_moe_ep.plan import ModelPlan, MoEBlock, as_pattern, matches
from hf_moe_ep.upstream.adapters import (
    make_copied_experts_error,
    without_adapters,
    wraps_for_adapters,
)
from hf_moe_ep.upstream.experts_interface import is_experts_module
from hf_moe_ep.upstream.models import (
    get_input_embedding,
    get_output_head,
    get_token_classifier,
    text_config,
)
from hf_moe_ep.upstream.module_names import get_stock_name, remove_names_of_copies
from hf_moe_ep.upstream.towers import takes_tower_outputs

# The names that fields of configs have for the number of experts per token.
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")
# The attributes of a router that hold its number of groups of experts, and the value of its
# `topk_method` with which it chooses experts by groups.
_GROUPS = ("num_group", "n_group")
_BY_GROUPS = "group_limited_greedy"


@dataclass(frozen=True)
class Tower:
    """A vision tower in its model.

    Attributes:
        module: the tower, which contains `blocks` and their `attention` modules.
        owner: the module whose forward runs the tower and then `decoder`, the language model.
    """

    module: nn.Module
    owner: nn.Module
    decoder: nn.Module
    blocks: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Encoders:
    """The modules that compute embeddings of pictures and sound.

    Attributes:
        modules: towers, projectors and all other modules with parameters outside of the decoder,
            including PEFT's wrappers of these modules.
        owner: the module whose forward runs the encoders and then `decoder`, the language model.
    """

    modules: tuple[nn.Module, ...]
    owner: nn.Module
    decoder: nn.Module


@dataclass(frozen=True)
class Parts:
    """The parts of one model, as PyTorch modules.

    Attributes:
        plan: the plan of the model's architecture.
        config: the config of the model's language model (its text config).
        root: the model whose forward always runs. In a PeftModel this is the inner model, because
            some callers bypass the forward of the PeftModel.
        layers: the decoder layers, in order, followed by the decoder layers of `mtp`. For a layer
            inside a checkpoint wrapper, the tuple has the wrapper.
        experts: the experts modules of all MoE layers, by name, in order, without wrappers.
        adapted_experts: the experts modules of each decoder layer, by the index of the layer. A
            module that PEFT wraps is listed with its wrapper. Each module is an FSDP2 unit: FSDP2
            all-gathers its parameters together.
        tied_modules: for models with tied layers (`ModelPlan.tied_layers`), maps each layer and
            each experts module of the first tower to the module of the second tower that has the
            same parameters. Experts modules that PEFT wraps are listed with their wrappers.
        attention: the modules in decoder layers that call transformers' attention interface.
        mixers: for each decoder layer, the direct children that need whole sequences, by name:
            children that are or contain a mixer, or whose input includes the tokens that the
            indexer of an earlier layer has chosen.
        final_norm: the norm before the head; an empty tuple if there is none.
        causal_lm: the module that owns `head`; None if the model has no language model head.
        classifier: the model if it classifies tokens; None if it does not.
        tied: True if head and embedding share a parameter.
        tower: a vision tower whose blocks are FSDP2 units; None if the model has no such tower.
        encoders: the encoders of a model whose `tower` is None; None if there are no encoders.
        mtp: the head for multi-token prediction; None if it is not trained.
    """

    plan: ModelPlan
    config: Any
    root: nn.Module
    layers: tuple[nn.Module, ...]
    experts: dict[str, nn.Module]
    adapted_experts: dict[int, tuple[nn.Module, ...]]
    tied_modules: dict[nn.Module, nn.Module]
    attention: tuple[nn.Module, ...]
    mixers: tuple[dict[str, nn.Module], ...]
    final_norm: tuple[nn.Module, ...]
    embedding: nn.Module | None
    head: nn.Module | None
    causal_lm: Any
    classifier: Any
    tied: bool
    tower: Tower | None
    encoders: Encoders | None
    mtp: MtpHead | None = None

    @property
    def main_layers(self) -> tuple[nn.Module, ...]:
        """The decoder layers without the layers of `mtp`."""
        return self.layers[: len(self.layers) - (0 if self.mtp is None else len(self.mtp.blocks))]

    @property
    def num_experts(self) -> int:
        """The number of experts of each MoE layer."""
        return count_stacked_experts(next(iter(self.experts.values())), self.plan)


@dataclass(frozen=True)
class Differences:
    """The changes that `model_patches` makes to the derived plan of an architecture.

    Attributes:
        origin: where the plan comes from, for `describe`.
        fields: values for fields of ModelPlan, which replace the derived values.
        refused: why models of this architecture cannot be patched; empty if they can.
    """

    origin: str = "derived"
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    def apply_to(self, plan: ModelPlan) -> ModelPlan:
        """Return `plan` with these changes, and with the sequence parallelism that was tested."""
        return replace(
            plan,
            origin=self.origin,
            sequence_parallel=plan.model_type in SEQUENCE_PARALLEL,
            context_parallel=plan.model_type in CONTEXT_PARALLEL,
            gathers_keys=plan.model_type in GATHERS_KEYS,
            splits_mixers=plan.model_type in SPLITS_MIXERS,
            **self.fields,
        )


def read_differences(model_type: str) -> Differences:
    """Read the changes in the architecture's file in `model_patches`, if this file exists."""
    file_name = model_type.replace("-", "_")
    name = f"hf_moe_ep.model_patches.{file_name}"
    if not file_name.isidentifier() or importlib.util.find_spec(name) is None:
        return Differences()
    file = importlib.import_module(name)
    return Differences(
        f"derived, with model_patches/{file_name}.py",
        getattr(file, "DIFFERS", {}),
        getattr(file, "REFUSED", ""),
    )


def find_block(model: nn.Module, given: ModelPlan | None = None) -> MoEBlock | None:
    """Return the description of MoE blocks outside of transformers' experts interface, or None.

    The description is a field of the `given` plan, or of the architecture's file in
    `model_patches`.
    """
    if given is not None:
        return given.block
    return read_differences(_read_model_type(model)).fields.get("block")


def _read_model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def find_plan(model: nn.Module, named: _NamedModules | None = None) -> ModelPlan:
    """Derive the plan of a model that is not sharded, and apply the changes of `model_patches`.

    Args:
        model: a stock or wrapped model.
        named: the modules of `model`, if the caller has collected them already.

    Raises:
        ValueError: the plan cannot be derived, or the architecture is refused; the message says
            why.
    """
    named = named or _NamedModules(model)
    model_type = _read_model_type(model)
    changes = read_differences(model_type)
    if changes.refused:
        raise ValueError(
            f"{type(model).__name__} ({model_type}) cannot be patched: {changes.refused} "
            f"(notebooks/6_new_architecture.ipynb shows what can be patched)"
        )
    inner = without_adapters(model)
    prefix = next((name for name, module in model.named_modules() if module is inner), "")
    start = f"{get_stock_name(prefix)}." if prefix else ""
    modules = {
        name[len(start) :]: module
        for name, module in named.stock.items()
        if name.startswith(start) and name != start.rstrip(".")
    }
    num_layers = changes.fields.get("num_layers", ModelPlan.num_layers)
    plan = derive_plan(inner, {"": named.stock.get(prefix, inner)} | modules, num_layers)
    return changes.apply_to(plan)


def find_parts(model: nn.Module, given: ModelPlan | None = None, *, complete: bool = True) -> Parts:
    """Find the parts of a model that is not sharded yet, and compare them with its config.

    Args:
        model: a stock or wrapped model.
        given: the user's plan; if it is None, the plan is derived.
        complete: False if other pipeline stages hold a part of the model.

    Raises:
        ValueError: the plan cannot be derived; the number of layers differs from the config; a
            module of the `given` plan does not exist; PEFT trains a copy of experts.
    """
    named = _NamedModules(model)
    _check_not_copied(named, find_block(model, given))
    model_config = getattr(model, "config", None)
    config = None if model_config is None else text_config(model_config)
    plan = find_plan(model, named) if given is None else given
    if given is not None and complete:
        _check_given_plan(model, named, plan, config)
    embedding, head = get_input_embedding(model), get_output_head(model)
    owners = (module for module in model.modules() if any(x is head for x in module.children()))
    parts = Parts(
        plan=plan,
        config=config,
        root=without_adapters(model),
        layers=tuple(named.unadapted[name] for name in named.matching(plan.layers)),
        experts=_find_experts(model, named, plan),
        adapted_experts=_find_adapted_experts(named, plan, plan.layers),
        tied_modules=_find_tied_modules(named, plan),
        attention=_find_attention(named, plan),
        mixers=_find_mixers(named, plan),
        final_norm=tuple(
            named.unadapted[name] for name in named.find_shortest_matching(plan.final_norm)
        ),
        embedding=embedding,
        head=head,
        causal_lm=None if head is None else next(owners, None),
        classifier=get_token_classifier(without_adapters(model)),
        # Head and embedding are tied even if they share only one of their parameters: PEFT's
        # modules_to_save adds a copy to a tied head, and this copy is not tied.
        tied=head is not None and embedding is not None and _share_parameters(head, embedding),
        tower=_find_tower(model, named, plan),
        encoders=_find_encoders(model, named, plan),
    )
    return parts if (mtp := find_head(model)) is None else _add_head(parts, mtp)


def _check_not_copied(named: _NamedModules, block: MoEBlock | None) -> None:
    """Raise ValueError if PEFT trains copies of experts, or of MoE blocks that a plan describes."""
    described = () if block is None else (block.name, f"{block.name}.{block.experts}")
    for name, module in named.stock.items():
        original = remove_names_of_copies(name)
        if original != name and (
            is_experts_module(module) or any(matches(pattern, original) for pattern in described)
        ):
            raise make_copied_experts_error(original)


def _add_head(parts: Parts, mtp: MtpHead) -> Parts:
    """Add the decoder layers of an MTP head, and the parts in them, to the parts of its model."""
    names = {module: name for name, module in parts.root.named_modules()}
    experts = dict(parts.experts)
    adapted_experts = dict(parts.adapted_experts)
    attention = list(parts.attention)
    for index, block in enumerate(mtp.blocks, len(parts.layers)):
        in_block = [module for module in block.modules() if is_experts_module(module)]
        experts |= {names[module]: module for module in in_block}
        adapted_experts[index] = tuple(in_block)
        attention += [module for module in block.modules() if is_attention(module)]
    return replace(
        parts,
        layers=(*parts.layers, *mtp.blocks),
        experts=experts,
        adapted_experts=adapted_experts,
        attention=tuple(attention),
        mixers=(*parts.mixers, *({} for _ in mtp.blocks)),
        mtp=mtp,
    )


def _check_given_plan(model: nn.Module, named: _NamedModules, plan: ModelPlan, config: Any) -> None:
    """Raise ValueError if modules of a given plan do not exist, or differ from the config."""
    kind = type(model).__name__
    for part in ("layers", "experts", "router", "attention", "final_norm"):
        pattern = getattr(plan, part)
        if (pattern or part in ("layers", "experts")) and not named.matching(pattern):
            optional = "" if part in ("layers", "experts") else f", or {part}='' if it has none"
            raise ValueError(
                f"the plan says {part}='{pattern}', but this {kind} has no such module; "
                f"{named.nearest(pattern)}; correct ModelPlan({part}=...){optional}"
            )
    layers = named.matching(plan.layers)
    expected = getattr(config, plan.num_layers, len(layers))
    if len(layers) != expected:
        raise ValueError(
            f"layers='{plan.layers}' of the plan matches {len(layers)} modules of this {kind}, but "
            f"its config says {plan.num_layers} = {expected}; write a pattern that matches only "
            f"the decoder layers, for example with ModelPlan(prefix=...)"
        )
    in_layers = [*layers, *named.matching(plan.tied_layers)]
    for name, experts in _find_experts(model, named, plan).items():
        if not any(name.startswith(f"{layer}.") for layer in in_layers):
            raise ValueError(
                f"{name} is in none of the {len(layers)} layers '{plan.layers}' of this {kind}; "
                f"correct ModelPlan(layers=...) or ModelPlan(experts=...)"
            )
        _check_weights(name, experts, plan, config)


def _check_weights(name: str, experts: nn.Module, plan: ModelPlan, config: Any) -> None:
    """Raise ValueError if stacked weights differ from a given plan, or from the config."""
    sizes = {n: int(p.shape[0]) for n, p in experts.named_parameters(recurse=False) if p.dim() > 1}
    missing = [weight for weight in plan.expert_weights if weight not in sizes]
    if missing:
        raise ValueError(
            f"the plan says expert_weights={plan.expert_weights}, but {name} has "
            f"{', '.join(sizes) or 'none'}; correct ModelPlan(expert_weights=...)"
        )
    num_experts = sizes[plan.expert_weights[0]]
    expected = getattr(config, plan.num_experts or "", num_experts)
    if expected != num_experts:
        raise ValueError(
            f"{name} has {num_experts} experts, but the config says {plan.num_experts} = "
            f"{expected}; correct the config, or name its field by ModelPlan(num_experts=...)"
        )


def read_experts_per_token(model: nn.Module, plan: ModelPlan, config: Any) -> int:
    """Return the number of experts per token: `top_k` of a router, or a field of the text config.

    An MoE block may have `top_k` instead of its router.

    Raises:
        ValueError: no router or block has a `top_k`, and the config has no such field.
    """
    named = {get_stock_name(name): module for name, module in model.named_modules()}
    routers = [name for name in named if plan.router and matches(plan.router, name)]
    blocks = [name.rpartition(".")[0] for name in named if matches(plan.experts, name)]
    for name in (*routers, *blocks):
        top_k = getattr(named[name], "top_k", None)
        if isinstance(top_k, int):
            return top_k
    for field_name in _TOP_K:
        if isinstance(getattr(config, field_name, None), int):
            return int(getattr(config, field_name))
    raise ValueError(
        f"the number of experts per token is unknown: the router '{plan.router}' has no top_k, and "
        f"the config of {plan.model_type} has none of {', '.join(_TOP_K)}"
    )


def count_router_groups(model: nn.Module, plan: ModelPlan) -> tuple[int, int]:
    """Return how many groups of experts the routers have, and how many of them a token uses.

    The result is (1, 1) if a token may choose among all experts. DeepSeek-V2 uses its groups only
    if `topk_method` is "group_limited_greedy".
    """
    for name, module in model.named_modules():
        if not plan.router or not matches(plan.router, get_stock_name(name)):
            continue
        groups = next((n for n in map(partial(_read_number, module), _GROUPS) if n is not None), 1)
        used = _read_number(module, "topk_group") or 1
        method = getattr(module, "topk_method", _BY_GROUPS)
        return (groups, used) if used < groups and method == _BY_GROUPS else (1, 1)
    return 1, 1


def _read_number(module: nn.Module, name: str) -> int | None:
    value = getattr(module, name, None)
    return value if isinstance(value, int) else None


class _NamedModules:
    """The modules of a model by their stock names, without the components that wrappers add.

    The modules of a head for multi-token prediction are left out. Each attribute maps every stock
    name to one module:

        outermost: the outermost wrapper of the stock module; without wrappers, the stock module.
        unadapted: the outermost wrapper that is not PEFT's (a checkpoint wrapper, for example);
            without such a wrapper, the stock module.
        stock: the stock module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outermost: dict[str, nn.Module] = {}
        self.unadapted: dict[str, nn.Module] = {}
        self.stock: dict[str, nn.Module] = {}
        adapters: set[str] = set()
        skipped: tuple[str, ...] = ()
        in_head: tuple[str, ...] = ()
        for wrapped_name, module in model.named_modules():
            # The modules of an adapter (lora_A, ...) are skipped.
            if wrapped_name in adapters:
                skipped = (f"{wrapped_name}.",)
            if isinstance(module, MtpHead):
                in_head = (f"{wrapped_name}.",)
            if wrapped_name in adapters or f"{wrapped_name}.".startswith((*skipped, *in_head)):
                continue
            name = get_stock_name(wrapped_name)
            self.outermost.setdefault(name, module)
            if wraps_for_adapters(module):
                names = (part for part, _ in module.named_children() if part != "base_layer")
                adapters |= {f"{wrapped_name}.{part}" for part in names}
            else:
                self.unadapted.setdefault(name, module)
                self.stock[name] = module

    def matching(self, pattern: str) -> list[str]:
        """Return the names that match a pattern of the plan, in the model's order."""
        return [name for name in self.stock if pattern and matches(pattern, name)]

    def nearest(self, pattern: str) -> str:
        """Describe, for an error, which module names resemble a pattern without a match."""
        starred = dict.fromkeys(map(as_pattern, self.stock))
        near = get_close_matches(pattern, starred, n=3, cutoff=0.4)
        return f"it has {', '.join(near)}" if near else f"its modules are {', '.join(starred)}"

    def find_shortest_matching(self, pattern: str) -> list[str]:
        """Return a list with the matching name that has the fewest components, or an empty list."""
        return sorted(self.matching(pattern), key=lambda name: name.count("."))[:1]


def _find_experts(model: nn.Module, named: _NamedModules, plan: ModelPlan) -> dict[str, nn.Module]:
    experts = {name: named.stock[name] for name in named.matching(plan.experts)}
    unsupported = [name for name, module in experts.items() if not is_experts_module(module)]
    if unsupported:
        derived = "" if plan.origin == "given" else "derived "
        raise ValueError(
            f"the {derived}plan says experts='{plan.experts}', but these modules of this "
            f"{type(model).__name__} do not use transformers' experts interface "
            f"(use_experts_implementation): {', '.join(unsupported)}; correct "
            f"ModelPlan(experts=...)"
        )
    return experts


def _find_attention(named: _NamedModules, plan: ModelPlan) -> tuple[nn.Module, ...]:
    """Return the attention modules; a derived plan's pattern may match other modules as well."""
    modules = (named.stock[name] for name in named.matching(plan.attention))
    return tuple(m for m in modules if plan.origin == "given" or is_attention(m))


def _find_mixers(named: _NamedModules, plan: ModelPlan) -> tuple[dict[str, nn.Module], ...]:
    """Return, for each decoder layer, the direct children that need whole sequences, by name."""
    layers = named.matching(plan.layers)
    by_layer: dict[str, dict[str, nn.Module]] = {name: {} for name in layers}
    if plan.mixers or plan.whole_sequences or plan.origin == "given":
        depth = layers[0].count(".") + 1
        for name, module in named.stock.items():
            components = name.split(".")
            layer, child = ".".join(components[:depth]), ".".join(components[: depth + 1])
            if layer in by_layer and child != layer and _needs_whole_sequences(name, module, plan):
                by_layer[layer][child] = named.outermost[child]
    return tuple(by_layer.values())


def _needs_whole_sequences(name: str, module: nn.Module, plan: ModelPlan) -> bool:
    """Return True if a module in a layer needs whole sequences.

    This is a mixer, a module that matches `ModelPlan.whole_sequences`, a module that a given plan
    calls a mixer, or a module whose input includes the tokens that the indexer of an earlier layer
    has chosen. A given plan need not list the mixers that `is_mixer` finds. In a derived plan, a
    name that matches `ModelPlan.mixers` is not enough: the module may be attention, or may not mix
    tokens.
    """
    patterns = plan.whole_sequences + (plan.mixers if plan.origin == "given" else ())
    if any(matches(pattern, name) for pattern in patterns):
        return True
    return is_mixer(module) or takes_chosen_tokens(module)


def _find_adapted_experts(
    named: _NamedModules, plan: ModelPlan, layers: str
) -> dict[int, tuple[nn.Module, ...]]:
    experts = named.matching(plan.experts)
    experts_by_layer = {
        index: tuple(named.outermost[name] for name in experts if name.startswith(f"{layer}."))
        for index, layer in enumerate(named.matching(layers))
    }
    return {index: modules for index, modules in experts_by_layer.items() if modules}


def _find_tied_modules(named: _NamedModules, plan: ModelPlan) -> dict[nn.Module, nn.Module]:
    towers = [
        (
            *(named.unadapted[name] for name in named.matching(layers)),
            *chain(*_find_adapted_experts(named, plan, layers).values()),
        )
        for layers in (plan.layers, plan.tied_layers)
    ]
    return dict(zip(*towers, strict=True)) if plan.tied_layers else {}


def _find_tower(model: nn.Module, named: _NamedModules, plan: ModelPlan) -> Tower | None:
    if plan.vision is None:
        return None
    names = named.matching(plan.vision.tower)
    if not names:
        raise ValueError(
            f"found no vision tower named '{plan.vision.tower}' in this {type(model).__name__}; "
            f"pass the model to patch() as from_pretrained returns it"
        )
    owner = named.stock[names[0].rpartition(".")[0]]
    if not takes_tower_outputs(owner):
        raise ValueError(
            f"in this version of transformers {type(owner).__name__} cannot take the outputs of a "
            f"vision tower that has run already, so a plan with vision= does not fit; leave out "
            f"plan= (then '{plan.vision.tower}' is all-gathered as a whole), or install a newer "
            f"transformers"
        )
    return Tower(
        module=named.unadapted[names[0]],
        owner=owner,
        decoder=named.stock[_find_decoder_name(named, plan)],
        blocks=tuple(named.unadapted[name] for name in named.matching(plan.vision.blocks)),
        attention=tuple(named.stock[name] for name in named.matching(plan.vision.attention)),
    )


def _find_encoders(model: nn.Module, named: _NamedModules, plan: ModelPlan) -> Encoders | None:
    if not plan.encoders:
        return None
    names = [name for pattern in plan.encoders for name in named.find_shortest_matching(pattern)]
    if len(names) < len(plan.encoders):
        raise ValueError(
            f"found only {len(names)} of the {len(plan.encoders)} encoders "
            f"{', '.join(map(repr, plan.encoders))} in this {type(model).__name__}; correct "
            f"ModelPlan(encoders=...)"
        )
    decoder = _find_decoder_name(named, plan)
    owner = decoder
    while not all(name.startswith(f"{owner}.") for name in names) and owner:
        owner = owner.rpartition(".")[0]
    return Encoders(
        modules=tuple(named.outermost[name] for name in names),
        owner=named.stock[owner],
        decoder=named.stock[decoder],
    )


def _find_decoder_name(named: _NamedModules, plan: ModelPlan) -> str:
    return named.matching(plan.layers)[0].rpartition(".")[0].rpartition(".")[0]


def _share_parameters(first: nn.Module, second: nn.Module) -> bool:
    return not {id(p) for p in first.parameters()}.isdisjoint(id(p) for p in second.parameters())
