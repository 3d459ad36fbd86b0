"""`derive_plan`: derive the plan of a model from its modules, for any architecture.

    experts      the modules that use transformers' experts interface
    layers       the list of modules that contains the experts; if lists are nested, the innermost
                 list whose elements transformers can recompute (activation checkpointing)
    tied layers  a later list of layers with experts that shares the parameters of `layers`
    attention    the modules in a layer that call transformers' attention interface
    mixers       the modules in a layer that take positions, masks or caches but do not call that
                 interface, and the modules that contain a convolution
    router       a module that has the same parent module as the experts and calls topk; if no such
                 module calls topk, one whose weight has one row per expert. PEFT's trained copies
                 of a router (modules_to_save) have the router's name
    final norm   the norm that follows the list of layers
    aux loss     exists if the forward of the head's module calls the load-balancing loss; the plan
                 names the attribute that holds its coefficient
    encoders     if a module around the decoder takes pictures or sound in its forward: the other
                 children of this module that have parameters, without embedding and head
    tower        the encoder, if the model has only one and its blocks can be FSDP2 units

There is no list of architectures, and the config only provides numbers to compare with. If several
modules fit one part of the plan, an error lists them.

A plan names each module as it was named before anything was wrapped (`upstream/module_names.py`),
without the prefix of the base model: "layers.*", not "model.layers.*".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import combinations
from typing import Any, NoReturn

from torch import nn

from hf_moe_ep.plan import ModelPlan, VisionPlan, as_pattern, matches
from hf_moe_ep.upstream.code import is_checkpointed_layer, list_forward_arguments, uses_name
from hf_moe_ep.upstream.experts_interface import is_experts_module
from hf_moe_ep.upstream.models import (
    CACHE_NAMES,
    find_aux_loss_attribute,
    find_base_model_prefix,
    get_input_embedding,
    get_latent_width,
    get_output_head,
    is_quantized,
    list_cache_methods,
    text_config,
)
from hf_moe_ep.upstream.module_names import remove_names_of_copies
from hf_moe_ep.upstream.towers import list_input_names, runs_in_blocks

# If the forward of a module takes one of these arguments, it mixes the tokens of a sequence.
_SEQUENCE_ARGUMENTS = (
    "attention_mask",
    "position_embeddings",
    *CACHE_NAMES,
    "cache_params",
    "cu_seqlens",
)
# An argument with the tokens that the indexer of an earlier layer has chosen for each token.
_CHOSEN_TOKENS = "prev_topk_indices"
# Methods of a cache, and of its layers, to which indexers and compressors pass their keys.
_UPDATES_OF_INDEXERS = ("update_indexer", "update_index", "store_compression_weights")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Fields of configs that hold the number of experts per layer.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_REMEDY = "name the right module with patch(model, plan=ModelPlan(...))"


def derive_plan(
    model: nn.Module,
    modules: Mapping[str, nn.Module] | None = None,
    num_layers: str = ModelPlan.num_layers,
) -> ModelPlan:
    """Derive the plan of a model that is not sharded.

    Args:
        model: stock, or wrapped by PEFT, torch.compile or activation checkpointing.
        modules: the modules by their stock names, without wrappers; by default,
            `model.named_modules()`.
        num_layers: the field of the text config that holds the number of decoder layers.

    Raises:
        ValueError: the model has no stacked experts; several modules fit one part of the plan; the
            config expects another number of layers or experts. The message has the fix.
    """
    named = dict(model.named_modules()) if modules is None else modules
    return _Derivation(model, named, num_layers).plan()


def count_stacked_experts(experts: nn.Module, plan: ModelPlan) -> int:
    """Return the number of experts in the stacked weights of an experts module."""
    return int(getattr(experts, plan.expert_weights[0]).shape[0])


def has_experts(model: nn.Module) -> bool:
    """Return True if a model has experts, even if no plan can be derived."""
    if any(map(is_experts_module, model.modules())):
        return True
    config = getattr(model, "config", None)
    counts = [] if config is None else [getattr(text_config(config), n, 0) for n in _EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


class _Derivation:
    """Derives the plan of one model.

    In the methods, `stack` is the name of the nn.ModuleList of the decoder layers, and `decoder` is
    the name of the module that owns this list.
    """

    def __init__(self, model: Any, modules: Mapping[str, nn.Module], num_layers: str) -> None:
        self.model, self.modules, self.num_layers = model, modules, num_layers
        self.kind = type(model).__name__
        self.config = getattr(model, "config", None)

    def plan(self) -> ModelPlan:
        experts = [name for name, module in self.modules.items() if is_experts_module(module)]
        if not experts:
            self._refuse_without_experts()
        stack, tied_stack = self._find_stacks(experts)
        experts = [name for name in experts if name.startswith(f"{stack}.")]
        self._check_number_of_layers(stack, experts)
        decoder = stack.rpartition(".")[0]
        num_experts = self._count_experts(experts)
        encoders = self._find_encoders(decoder)
        vision = self._derive_vision(encoders)
        plan = ModelPlan(
            model_type=str(getattr(self.config, "model_type", "")),
            layers=self._derive_layers(stack),
            experts=self._make_pattern(experts),
            attention=self._derive_attention(stack),
            final_norm=self._derive_final_norm(decoder, stack),
            mixers=tuple(sorted(set(map(self._remove_prefix, self._derive_mixers(stack))))),
            num_experts=self._find_num_experts_field(experts[0], num_experts),
            expert_weights=self._list_expert_weights(experts[0], num_experts),
            aux_loss_coef=self._find_aux_loss_coefficient(),
            vision=vision,
            encoders=() if vision else tuple(map(self._remove_prefix, encoders)),
            origin="derived",
        )
        plan = replace(plan, router=self._derive_router(plan, stack, experts, num_experts))
        if tied_stack is None:
            return plan
        return _add_tied_layers(plan, self._derive_layers(tied_stack))

    def _refuse_without_experts(self) -> NoReturn:
        kinds = sorted({type(module).__name__ for module in self.modules.values()})
        searches = ([k for k in kinds if re.search(word, k)] for word in ("Expert", "MoE|Moe$"))
        similar = next(filter(None, searches), [])
        if similar and is_quantized(self.model):
            raise ValueError(
                f"this {self.kind} was loaded with quantized experts ({', '.join(similar)}), which "
                f"cannot be trained here; load it in bf16: hf_moe_ep.from_pretrained(...) reads "
                f"MXFP4 and FP8 checkpoints as bf16, and so does stock with quantization_config="
                f"Mxfp4Config(dequantize=True) or FineGrainedFP8Config(dequantize=True)"
            )
        raise ValueError(
            f"unknown architecture {getattr(self.config, 'model_type', None)!r} ({self.kind}): "
            f"none of its modules uses transformers' experts interface "
            f"(use_experts_implementation)"
            + (f"; it has {', '.join(similar)}" if similar else "")
            + ". If the model is dense, train it with FSDP2 alone, without hf_moe_ep. If it has "
            "experts, describe its MoE blocks in a plan, with ModelPlan(block=MoEBlock(...)), as "
            "in notebooks/6_new_architecture.ipynb"
        )

    def _check_number_of_layers(self, stack: str, experts: Collection[str]) -> None:
        """Raise ValueError if the config expects other numbers of layers or MoE layers."""
        if self.config is None:
            return
        config = text_config(self.config)
        layers = len(self._list_children(stack))
        with_experts = len({name[len(stack) + 1 :].partition(".")[0] for name in experts})
        expected_layers = getattr(config, self.num_layers, layers)
        patterns = set(map(as_pattern, experts))
        without_interface = [
            n for n in self.modules if as_pattern(n) in patterns and n not in experts
        ]
        others = ""
        if without_interface:
            names = ", ".join(without_interface)
            others = f" (without transformers' experts interface: {names})"
        for kind, number, expected in (
            ("decoder layers", layers, expected_layers),
            ("layers with experts", with_experts, _count_expected_moe_layers(config)),
        ):
            if expected is not None and number != expected:
                raise ValueError(
                    f"found {number} {kind} in this {self.kind}{others}, "
                    f"expected {expected} from its config; pass the model to patch() as "
                    f"from_pretrained returns it"
                )

    def _find_stacks(self, experts: Iterable[str]) -> tuple[str, str | None]:
        """Return the names of the nn.ModuleLists of the decoder layers and of the tied layers."""
        stacks = list(dict.fromkeys(self._find_list_around(name) for name in experts))
        pairs = combinations(stacks, 2)
        tied = next((pair for pair in pairs if self._share_parameters(*pair)), None)
        if tied is not None:
            stacks.remove(tied[1])
        if len(stacks) > 1:
            # Only the decoder is patched. Experts in a vision tower keep running stock code.
            decoders = [name for name in stacks if self._is_in_decoder(name)]
            if len(decoders) != 1:
                raise ValueError(
                    f"this {self.kind} has experts in several lists of layers, "
                    f"{', '.join(map(repr, stacks))}, and it is unclear which belongs to the "
                    f"decoder; {_REMEDY}"
                )
            stacks = decoders
        return stacks[0], tied[1] if tied is not None and tied[0] == stacks[0] else None

    def _share_parameters(self, first: str, second: str) -> bool:
        """Return True if two lists of layers have the same length and share parameters."""
        ids, others = ({id(p) for p in self.modules[x].parameters()} for x in (first, second))
        same_length = len(self._list_children(first)) == len(self._list_children(second))
        return same_length and not ids.isdisjoint(others)

    def _derive_layers(self, stack: str) -> str:
        return self._make_pattern([f"{stack}.{name}" for name in self._list_children(stack)])

    def _find_list_around(self, experts: str) -> str:
        """Return the name of the list that holds the layer of an experts module."""
        parts = experts.split(".")
        lists = [
            ".".join(parts[:end])
            for end in range(len(parts) - 1, 0, -1)
            if isinstance(self.modules.get(".".join(parts[:end])), nn.ModuleList)
        ]
        if not lists:
            raise ValueError(
                f"{experts} of this {self.kind} is in no list of decoder layers (nn.ModuleList); "
                f"{_REMEDY}"
            )
        checkpointed = [
            name for name in lists if any(map(is_checkpointed_layer, self._list_elements(name)))
        ]
        return (checkpointed or lists)[0]

    def _is_in_decoder(self, stack: str) -> bool:
        decoder = self.modules[stack.rpartition(".")[0]]
        get_decoder = getattr(self.model, "get_decoder", None)
        return get_decoder is not None and get_decoder() is decoder

    def _count_experts(self, experts: Iterable[str]) -> int:
        sizes = {name: _read_size_of_stack(self.modules[name]) for name in experts}
        unstacked = [name for name, size in sizes.items() if not size]
        if unstacked:
            raise ValueError(
                f"{unstacked[0]} of this {self.kind} has no weight of shape [experts, ., .]; "
                f"{_REMEDY}"
            )
        if len(set(sizes.values())) > 1:
            fewest, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise ValueError(
                f"layers of this {self.kind} have different numbers of experts, {sizes[fewest]} in "
                f"{fewest} and {sizes[most]} in {most}; expert parallelism needs the same number "
                f"in all layers"
            )
        return next(iter(sizes.values()))

    def _find_num_experts_field(self, experts: str, num_experts: int) -> str | None:
        """Return the field of the text config that holds the number of experts, if there is one.

        If several fields hold that number, return a field that the code of the experts reads.
        """
        if self.config is None:
            return None
        config = text_config(self.config)
        counts = {name: getattr(config, name, None) for name in _EXPERT_COUNTS}
        counts = {name: count for name, count in counts.items() if isinstance(count, int)}
        equal = [name for name, count in counts.items() if count == num_experts]
        if counts and not equal:
            field, count = next(iter(counts.items()))
            raise ValueError(
                f"each layer of this {self.kind} has {num_experts} experts, but its config says "
                f"{field} = {count}; pass the model to patch() as from_pretrained returns it"
            )
        # A field whose name occurs in the code of the experts comes first. The name `num_experts`
        # comes last among these fields, because the code may mean the module's own attribute of
        # this name.
        module = self.modules[experts]
        equal.sort(key=lambda name: (not uses_name(module, name), name == _EXPERT_COUNTS[0]))
        return equal[0] if equal else None

    def _list_expert_weights(self, experts: str, num_experts: int) -> tuple[str, ...]:
        parameters = self.modules[experts].named_parameters(recurse=False)
        return tuple(n for n, p in parameters if p.dim() > 1 and p.shape[0] == num_experts)

    def _derive_router(
        self, plan: ModelPlan, stack: str, experts: Iterable[str], num_experts: int
    ) -> str:
        """Return the pattern of the routers.

        Only modules inside the parents of the experts modules are candidates. A router is a
        candidate that calls topk. If no candidate calls topk, a router is a candidate that has a
        weight with one row per expert.
        """
        parents = {name.rpartition(".")[0] for name in experts}
        candidates = {
            name: module
            for name, module in self._find_in_layers(stack).items()
            if any(name.startswith(f"{parent}.") for parent in parents)
            and not any(f"{name}.".startswith(f"{other}.") for other in experts)
        }
        # If the parent of the experts is the decoder layer itself, it contains attention as well.
        candidates = {n: m for n, m in candidates.items() if not _takes_a_sequence(m)}
        with_topk = dict.fromkeys(
            as_pattern(remove_names_of_copies(name))
            for name, module in candidates.items()
            if uses_name(module, "topk")
        )
        with_rows = dict.fromkeys(
            as_pattern(remove_names_of_copies(name))
            for name, module in candidates.items()
            if any(_has_rows(p, num_experts) for p in module.parameters(recurse=False))
        )
        modules_per_layer = len(set(map(as_pattern, experts)))
        return self._merge_router_patterns(plan, with_topk or with_rows, modules_per_layer)

    def _merge_router_patterns(
        self, plan: ModelPlan, patterns: Collection[str], modules_per_layer: int
    ) -> str:
        if not patterns:
            return ""
        # A layer may have several experts modules, each with its own router. The plan has only one
        # pattern for all these routers, so their patterns are merged.
        merged = next(iter(patterns)) if len(patterns) == 1 else _merge_patterns(patterns)
        if merged is None or len(patterns) > modules_per_layer:
            raise ValueError(
                f"this {self.kind} has several modules that could be the router: "
                f"{', '.join(repr(self._remove_prefix(name)) for name in patterns)}; choose one: "
                f"patch(model, plan={_format_without_router(plan)})"
            )
        return self._remove_prefix(merged)

    def _derive_attention(self, stack: str) -> str:
        # Modules of Inkling2 that attend to earlier layers call the interface too. They are not
        # attention over the sequence, and take none of _SEQUENCE_ARGUMENTS.
        names = [
            name
            for name, module in self._find_in_layers(stack).items()
            if is_attention(module) and _takes_a_sequence(module)
        ]
        return self._make_pattern(names) if names else ""

    def _derive_mixers(self, stack: str) -> set[str]:
        """Return the patterns of the mixers in layers; a mixer inside another one is left out."""
        mixers = {name for name, module in self._find_in_layers(stack).items() if is_mixer(module)}
        return {as_pattern(name) for name in mixers if mixers.isdisjoint(_yield_containers(name))}

    def _derive_final_norm(self, decoder: str, stack: str) -> str:
        follows_layers = False
        norms = []
        for name in self._list_children(decoder):
            full = f"{decoder}.{name}".lstrip(".")
            follows_layers = follows_layers or full == stack
            if follows_layers and "norm" in type(self.modules[full]).__name__.lower():
                norms.append(full)
        if len(norms) > 1:
            raise ValueError(
                f"several norms follow the layers of this {self.kind}, "
                f"{', '.join(map(repr, norms))}; {_REMEDY}"
            )
        return self._remove_prefix(norms[0]) if norms else ""

    def _find_aux_loss_coefficient(self) -> str | None:
        head = get_output_head(self.model)
        owner = next(
            (m for m in self.modules.values() if any(x is head for x in m.children())), None
        )
        return None if head is None or owner is None else find_aux_loss_attribute(owner)

    def _find_encoders(self, decoder: str) -> list[str]:
        """Return the names of the encoders.

        Among the modules that contain the decoder, find the innermost module whose forward takes
        pictures or sound. Its encoders are its other children that have parameters; the embedding
        and the head are not encoders. If no such module exists, there are no encoders.
        """
        owner, inner = decoder.rpartition(".")[0], decoder
        while inner and not list_input_names(self.modules[owner]):
            owner, inner = owner.rpartition(".")[0], owner
        if not inner:
            return []
        not_encoders = {get_input_embedding(self.model), get_output_head(self.model)}
        children = [f"{owner}.{name}".lstrip(".") for name in self._list_children(owner)]
        return [
            name
            for child in children
            if child != inner
            for name in self._list_with_forward(child)
            if self.modules[name] not in not_encoders and _has_parameters(self.modules[name])
        ]

    def _list_with_forward(self, name: str) -> list[str]:
        """Return [name], or the elements of a list or dict of modules, which has no forward."""
        if not isinstance(self.modules[name], nn.ModuleList | nn.ModuleDict):
            return [name]
        return [
            m
            for child in self._list_children(name)
            for m in self._list_with_forward(f"{name}.{child}")
        ]

    def _derive_vision(self, encoders: list[str]) -> VisionPlan | None:
        """Describe the tower, if it is the only encoder and its blocks can be FSDP2 units."""
        if len(encoders) != 1:
            return None
        tower = encoders[0]
        if not runs_in_blocks(self.modules[tower.rpartition(".")[0]], self.modules[tower]):
            return None
        blocks = [
            inner
            for inner, module in self.modules.items()
            if inner.startswith(f"{tower}.") and is_checkpointed_layer(module)
        ]
        attention = [
            name
            for name, module in self.modules.items()
            if name.startswith(f"{tower}.") and is_attention(module)
        ]
        if not blocks or any(len(set(map(as_pattern, x))) > 1 for x in (blocks, attention)):
            return None
        return VisionPlan(
            tower=self._remove_prefix(tower),
            blocks=self._make_pattern(blocks),
            attention=self._make_pattern(attention) if attention else "",
        )

    def _list_children(self, name: str) -> list[str]:
        start = f"{name}." if name else ""
        rest = (n[len(start) :] for n in self.modules if n.startswith(start) and n != name)
        return [n for n in rest if "." not in n and n]

    def _list_elements(self, name: str) -> list[nn.Module]:
        return [self.modules[f"{name}.{child}"] for child in self._list_children(name)]

    def _find_in_layers(self, stack: str) -> dict[str, nn.Module]:
        """Return the modules inside decoder layers by name, without the layers themselves."""
        depth = stack.count(".") + 2
        return {
            name: module
            for name, module in self.modules.items()
            if name.startswith(f"{stack}.") and name.count(".") >= depth
        }

    def _make_pattern(self, names: Iterable[str]) -> str:
        """Return one pattern that matches all names.

        The names may differ in numbers, and in one other component: "0.a.x" and "1.b.x" give
        "*.*.x".

        Raises:
            ValueError: the names differ in more components.
        """
        patterns = list(dict.fromkeys(map(as_pattern, names)))
        merged = patterns[0] if len(patterns) == 1 else _merge_patterns(patterns)
        if merged is None:
            raise ValueError(
                f"no single pattern matches these modules of this {self.kind}: "
                f"{', '.join(map(repr, patterns))}; {_REMEDY}"
            )
        return self._remove_prefix(merged)

    def _remove_prefix(self, name: str) -> str:
        prefix = find_base_model_prefix(self.model)
        return name.removeprefix(f"{prefix}.") if prefix else name


def _count_expected_moe_layers(config: Any) -> int | None:
    """Return the number of MoE layers that a config describes; None if the number is unknown.

    This function reads only fields that several architectures have, and only if the class of the
    config declares them. A config.json may hold fields of another architecture, which transformers
    keeps and the model never reads.
    """

    def declared(name: str) -> Any:
        return getattr(config, name, None) if hasattr(type(config), name) else None

    layers = getattr(config, "num_hidden_layers", None)
    kinds = declared("mlp_layer_types")
    if kinds and set(kinds) <= {"sparse", "dense"}:
        return list(kinds).count("sparse")
    step = declared("decoder_sparse_step")
    if step is not None and layers is not None:
        dense = declared("mlp_only_layers") or ()
        return sum(i not in dense and (i + 1) % step == 0 for i in range(layers))
    first = declared("first_k_dense_replace")
    if first is not None and layers is not None:
        return int(max(layers - first, 0))
    return None


def _format_without_router(plan: ModelPlan) -> str:
    """Format a plan as Python code, for an error, with "..." as the router."""
    arguments = [repr(plan.model_type)]
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name == "router":
            arguments.append("router=...")
        elif field.name not in ("model_type", "origin") and value not in (field.default, {}):
            arguments.append(f"{field.name}={value!r}")
    return f"ModelPlan({', '.join(arguments)})"


def _add_tied_layers(plan: ModelPlan, tied_layers: str) -> ModelPlan:
    """Let the patterns of experts and routers match the modules in both lists of layers.

    "a.b.layers.*.experts" becomes "layers.*.experts" if the tied layers are "c.layers.*".
    """
    components = plan.layers.split(".")
    ends = (".".join(components[start:]) for start in range(len(components)))
    common = next(end for end in ends if matches(end, tied_layers))
    experts, router = (
        pattern and common + pattern.removeprefix(plan.layers)
        for pattern in (plan.experts, plan.router)
    )
    return replace(plan, tied_layers=tied_layers, experts=experts, router=router)


def _yield_containers(name: str) -> Iterator[str]:
    """Yield the names of all modules that contain the module `name`, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def _read_size_of_stack(experts: nn.Module) -> int:
    """Return the first size of the first 3-dim parameter, or 0 if there is no such parameter."""
    sizes = [int(p.shape[0]) for p in experts.parameters(recurse=False) if p.dim() == 3]
    return sizes[0] if sizes else 0


def is_attention(module: nn.Module) -> bool:
    """Return True if a module calls transformers' attention interface."""
    return uses_name(module, _ATTENTION_INTERFACE)


def is_mixer(module: nn.Module) -> bool:
    """Return True if a module mixes the tokens of a sequence without the attention interface."""
    if any(isinstance(part, _CONVOLUTIONS) for part in (module, *module.children())):
        return True
    return _takes_a_sequence(module) and not any(map(is_attention, module.modules()))


def _takes_a_sequence(module: nn.Module) -> bool:
    """Return True if the forward of a module takes one of `_SEQUENCE_ARGUMENTS`."""
    return not list_forward_arguments(module).isdisjoint(_SEQUENCE_ARGUMENTS)


def takes_chosen_tokens(module: nn.Module) -> bool:
    """Return True if an attention module takes the tokens that an earlier layer's indexer chose."""
    return is_attention(module) and _CHOSEN_TOKENS in list_forward_arguments(module)


def gathers_by_cache(module: nn.Module) -> bool:
    """Return True if a module needs whole sequences only for the keys that it passes to a cache.

    Such a module is attention with an indexer or a compressor. It mixes tokens nowhere else if its
    code calls only the cache's methods that `GatheringCache` has.
    """
    if not is_attention(module) or list_forward_arguments(module).isdisjoint(CACHE_NAMES):
        return False
    if any(isinstance(inner, _CONVOLUTIONS) for inner in module.modules()):
        return False
    has_indexer = any(
        uses_name(inner, name) for inner in module.modules() for name in _UPDATES_OF_INDEXERS
    )
    others = list_cache_methods() - {"update", "update_indexer", "layers", "get_seq_length"}
    calls_others = any(uses_name(inner, name) for inner in module.modules() for name in others)
    return (has_indexer or takes_chosen_tokens(module)) and not calls_others


def caches_latents(module: nn.Module) -> bool:
    """Return True if an attention module computes keys and values from latents in its cache."""
    if not is_attention(module) or list_forward_arguments(module).isdisjoint(CACHE_NAMES):
        return False
    others = list_cache_methods() - {"update"}
    calls_others = any(uses_name(inner, name) for inner in module.modules() for name in others)
    return get_latent_width(module) is not None and uses_name(module, "update") and not calls_others


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_rows(parameter: nn.Parameter, rows: int) -> bool:
    return parameter.dim() == 2 and parameter.shape[0] == rows


def _merge_patterns(patterns: Iterable[str]) -> str | None:
    """Return one pattern for all, or None if they do not differ in exactly one component."""
    parts = [pattern.split(".") for pattern in patterns]
    if len({len(p) for p in parts}) != 1:
        return None
    columns = [set(column) for column in zip(*parts, strict=True)]
    if sum(len(column) > 1 for column in columns) != 1:
        return None
    return ".".join(next(iter(column)) if len(column) == 1 else "*" for column in columns)
