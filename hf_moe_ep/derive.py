"""`derive_plan`: a plan read off a model that somebody has built, whatever its architecture.

    experts      modules of transformers' experts interface
    layers       the nearest module above each of them that can be checkpointed, in its list
    attention    what calls the attention interface within a layer
    mixers       what is handed positions, masks or caches there, and does not; convolutions
    router       beside the experts: what chooses by topk, or has a row of weights per expert
    final norm   behind the list of layers
    aux loss     whether the head's forward calls the load-balancing loss, and who has its weight
    encoders     beside the decoder, in the model whose forward takes pictures or sound
    tower        the same, where its blocks can be units of their own

Only what a model has is asked: no list of architectures, and of the config only numbers to compare
with. Where two answers are possible there is an error that shows them both.

Names are those that modules had before anything wrapped them (`upstream/module_names.py`), behind
the prefix of the base model: "layers.*", not "model.layers.*".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

from torch import nn

from hf_moe_ep.plan import ModelPlan, VisionPlan, as_pattern
from hf_moe_ep.upstream.code import calls, forward_arguments, is_checkpointed_layer
from hf_moe_ep.upstream.experts_interface import is_experts_module
from hf_moe_ep.upstream.models import (
    CACHE_NAMES,
    aux_loss_coefficient,
    base_model_prefix,
    input_embedding,
    is_quantized,
    output_head,
    text_config,
)
from hf_moe_ep.upstream.modules import own_children
from hf_moe_ep.upstream.towers import input_names, runs_in_blocks

# What only a module that looks along the sequence is handed.
_SEQUENCE_ARGUMENTS = (
    "attention_mask",
    "position_embeddings",
    *CACHE_NAMES,
    "cache_params",
    "cu_seqlens",
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Fields of configs that say how many experts a layer has.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_REMEDY = "say where they are: patch(model, plan=ModelPlan(...))"


def derive_plan(model: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> ModelPlan:
    """Derive the plan of a model that is not sharded.

    Args:
        model: stock, or within the wrappers of PEFT, torch.compile or checkpointing.
        modules: its modules by their stock names, without wrappers; those of `model` where left
            out.

    Raises:
        ValueError: no stacked experts; parts that cannot be told apart, or that are not where the
            config says; each with what was found and what to do.
    """
    return _Derivation(model, dict(model.named_modules()) if modules is None else modules).plan()


def stacked_experts(experts: nn.Module, plan: ModelPlan) -> int:
    """Count the experts that a module holds."""
    return int(getattr(experts, plan.expert_weights[0]).shape[0])


class _Derivation:
    """One model on its way to a plan."""

    def __init__(self, model: Any, modules: Mapping[str, nn.Module]) -> None:
        self.model, self.modules = model, modules
        self.kind = type(model).__name__
        self.config = getattr(model, "config", None)

    def plan(self) -> ModelPlan:
        experts = [name for name, module in self.modules.items() if is_experts_module(module)]
        if not experts:
            self._refuse_without_experts()
        stack = self._stack_of_layers(experts)
        experts = [name for name in experts if name.startswith(f"{stack}.")]
        self._check_number_of_layers(stack, experts)
        decoder = stack.rpartition(".")[0]
        num_experts = self._num_experts(experts)
        encoders = self._encoders(decoder)
        vision = self._vision(encoders)
        plan = ModelPlan(
            model_type=str(getattr(self.config, "model_type", "")),
            layers=self._pattern([f"{stack}.{name}" for name in self._children(stack)]),
            experts=self._pattern(experts),
            attention=self._attention(stack),
            final_norm=self._final_norm(decoder, stack),
            mixers=tuple(sorted({self._relative(name) for name in self._mixers(stack)})),
            num_experts=self._field_of_num_experts(experts[0], num_experts),
            expert_weights=self._expert_weights(experts[0], num_experts),
            aux_loss_coef=self._aux_loss_coefficient(),
            vision=vision,
            encoders=() if vision else tuple(map(self._relative, encoders)),
            origin="derived",
        )
        return replace(plan, router=self._router(plan, stack, experts, num_experts))

    def _refuse_without_experts(self) -> NoReturn:
        kinds = sorted({type(module).__name__ for module in self.modules.values()})
        searches = ([k for k in kinds if re.search(word, k)] for word in ("Expert", "MoE|Moe$"))
        alike = next(filter(None, searches), [])
        if alike and is_quantized(self.model):
            raise ValueError(
                f"this {self.kind} was loaded with quantized experts ({', '.join(alike)}), which "
                f"cannot be trained here; load it in bf16: hf_moe_ep.from_pretrained(...) reads "
                f"MXFP4 and FP8 as that, and stock's with quantization_config="
                f"Mxfp4Config(dequantize=True) or FineGrainedFP8Config(dequantize=True)"
            )
        raise ValueError(
            f"unknown architecture {getattr(self.config, 'model_type', None)!r} ({self.kind}): "
            f"none of its modules is of transformers' experts interface "
            f"(use_experts_implementation)"
            + (f"; it has {', '.join(alike)}" if alike else "")
            + ". Only stacked experts behind that interface can be split over ep; a model with "
            "experts of another making trains under FSDP2 without hf_moe_ep"
        )

    def _check_number_of_layers(self, stack: str, experts: Collection[str]) -> None:
        """Raise where the config says another number of layers, or of layers with experts."""
        if self.config is None:
            return
        config = text_config(self.config)
        layers = len(self._children(stack))
        with_experts = len({name[len(stack) + 1 :].partition(".")[0] for name in experts})
        said = getattr(config, "num_hidden_layers", layers)
        expected = _expected_moe_layers(config)
        places = set(map(as_pattern, experts))
        foreign = [n for n in self.modules if as_pattern(n) in places and n not in experts]
        others = f" (not of transformers' experts interface: {', '.join(foreign)})"
        for kind, found, wanted in (
            ("decoder layers", layers, said),
            ("layers with experts", with_experts, expected),
        ):
            if wanted is not None and found != wanted:
                raise ValueError(
                    f"found {found} {kind} in this {self.kind}{others if foreign else ''}, "
                    f"expected {wanted} from its config; patch() wants the model as "
                    f"from_pretrained returns it"
                )

    def _stack_of_layers(self, experts: Iterable[str]) -> str:
        """Name the list whose elements are decoder layers."""
        stacks = list(dict.fromkeys(self._list_around(name) for name in experts))
        if len(stacks) > 1:
            # Experts in a tower as well: those are computed as they stand.
            decoders = [name for name in stacks if self._is_in_decoder(name)]
            if len(decoders) != 1:
                raise ValueError(
                    f"experts of this {self.kind} stand in several lists of layers, "
                    f"{', '.join(map(repr, stacks))}, and nothing says which is the decoder; "
                    f"{_REMEDY}"
                )
            stacks = decoders
        return stacks[0]

    def _list_around(self, experts: str) -> str:
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
            name for name in lists if any(map(is_checkpointed_layer, self._elements(name)))
        ]
        return (checkpointed or lists)[0]

    def _is_in_decoder(self, stack: str) -> bool:
        decoder = self.modules[stack.rpartition(".")[0]]
        get_decoder = getattr(self.model, "get_decoder", None)
        return get_decoder is not None and get_decoder() is decoder

    def _num_experts(self, experts: Iterable[str]) -> int:
        sizes = {name: _rows_of_stack(self.modules[name]) for name in experts}
        without = [name for name, size in sizes.items() if not size]
        if without:
            raise ValueError(f"{without[0]} of this {self.kind} has no weights [experts, ., .]")
        if len(set(sizes.values())) > 1:
            few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise ValueError(
                f"layers of this {self.kind} have different numbers of experts, {sizes[few]} in "
                f"{few} and {sizes[many]} in {many}; ep wants one number"
            )
        return next(iter(sizes.values()))

    def _field_of_num_experts(self, experts: str, num_experts: int) -> str | None:
        """Name the field of the config that says so, as the code of the experts calls it."""
        if self.config is None:
            return None
        config = text_config(self.config)
        said = {name: getattr(config, name, None) for name in _EXPERT_COUNTS}
        said = {name: value for name, value in said.items() if isinstance(value, int)}
        found = [name for name, value in said.items() if value == num_experts]
        if said and not found:
            field, value = next(iter(said.items()))
            raise ValueError(
                f"the experts of this {self.kind} are {num_experts} and its config says {field} "
                f"= {value}; patch() wants the model as from_pretrained returns it"
            )
        # The module's own attribute is called num_experts too, which says nothing.
        kind = self.modules[experts]
        found.sort(key=lambda name: (not calls(kind, name), name == _EXPERT_COUNTS[0]))
        return found[0] if found else None

    def _expert_weights(self, experts: str, num_experts: int) -> tuple[str, ...]:
        parameters = self.modules[experts].named_parameters(recurse=False)
        return tuple(n for n, p in parameters if p.dim() > 1 and p.shape[0] == num_experts)

    def _router(self, plan: ModelPlan, stack: str, experts: Iterable[str], num_experts: int) -> str:
        """Name what chooses: beside the experts it calls topk, else it has a row for each."""
        blocks = {name.rpartition(".")[0] for name in experts}
        beside = {
            name: module
            for name, module in self._within_layers(stack).items()
            if any(name.startswith(f"{block}.") for block in blocks)
            and not any(f"{name}.".startswith(f"{other}.") for other in experts)
        }
        # Where experts stand in the decoder layer itself, attention is beside them too.
        beside = {n: m for n, m in beside.items() if not _looks_along_the_sequence(m)}
        choosing = {as_pattern(n): n for n, m in beside.items() if calls(m, "topk")}
        holding = {
            as_pattern(name): name
            for name, module in beside.items()
            if any(_has_rows(p, num_experts) for p in module.parameters(recurse=False))
        }
        return self._one_router(plan, choosing or holding, len(set(map(as_pattern, experts))))

    def _one_router(self, plan: ModelPlan, found: Mapping[str, str], sets_of_experts: int) -> str:
        if not found:
            return ""
        # One for each of several sets of experts in a layer is one pattern.
        joined = next(iter(found)) if len(found) == 1 else _joined(found)
        if joined is None or len(found) > sets_of_experts:
            raise ValueError(
                f"this {self.kind} has several modules that could be the router: "
                f"{', '.join(repr(self._relative(name)) for name in found)}; say which: "
                f"patch(model, plan={_as_code(plan, 'router')})"
            )
        return self._relative(joined)

    def _attention(self, stack: str) -> str:
        # Inkling2's residuals attend too, but to earlier layers: they are told of no sequence.
        names = [
            name
            for name, module in self._within_layers(stack).items()
            if is_attention(module) and _looks_along_the_sequence(module)
        ]
        return self._pattern(names) if names else ""

    def _mixers(self, stack: str) -> set[str]:
        """Name, with stars, what mixes tokens of a sequence past the attention interface."""
        found = {name for name, module in self._within_layers(stack).items() if is_mixer(module)}
        # The outermost of a layer alone: what is in a mixer belongs to it.
        return {as_pattern(name) for name in found if found.isdisjoint(_above(name))}

    def _final_norm(self, decoder: str, stack: str) -> str:
        behind = False
        norms = []
        for name in self._children(decoder):
            full = f"{decoder}.{name}".lstrip(".")
            behind = behind or full == stack
            if behind and "norm" in type(self.modules[full]).__name__.lower():
                norms.append(full)
        if len(norms) > 1:
            raise ValueError(
                f"behind the layers of this {self.kind} stand several norms, "
                f"{', '.join(map(repr, norms))}; {_REMEDY}"
            )
        return self._relative(norms[0]) if norms else ""

    def _aux_loss_coefficient(self) -> str | None:
        head = output_head(self.model)
        owner = next((m for m in self.modules.values() if head in own_children(m)), None)
        return None if head is None or owner is None else aux_loss_coefficient(owner)

    def _encoders(self, decoder: str) -> list[str]:
        """Name what holds parameters beside the decoder, where pictures or sound come in."""
        owner, inner = decoder.rpartition(".")[0], decoder
        while inner and not input_names(self.modules[owner]):
            owner, inner = owner.rpartition(".")[0], owner
        if not inner:
            return []
        others = {input_embedding(self.model), output_head(self.model)}
        children = [f"{owner}.{name}".lstrip(".") for name in self._children(owner)]
        return [
            name
            for child in children
            if child != inner
            for name in self._that_run(child)
            if self.modules[name] not in others and _has_parameters(self.modules[name])
        ]

    def _that_run(self, name: str) -> list[str]:
        """Name the module, or of a list or dict, which has no forward, what is in there."""
        if not isinstance(self.modules[name], nn.ModuleList | nn.ModuleDict):
            return [name]
        return [m for child in self._children(name) for m in self._that_run(f"{name}.{child}")]

    def _vision(self, encoders: list[str]) -> VisionPlan | None:
        """Find the one tower, if the forward around it takes its outputs and it has blocks."""
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
        unlike = [len(set(map(as_pattern, names))) > 1 for names in (blocks, attention)]
        if not blocks or any(unlike):
            return None
        return VisionPlan(
            tower=self._relative(tower),
            blocks=self._pattern(blocks),
            attention=self._pattern(attention) if attention else "",
        )

    def _children(self, name: str) -> list[str]:
        start = f"{name}." if name else ""
        rest = (n[len(start) :] for n in self.modules if n.startswith(start) and n != name)
        return [n for n in rest if "." not in n and n]

    def _elements(self, name: str) -> list[nn.Module]:
        return [self.modules[f"{name}.{child}"] for child in self._children(name)]

    def _within_layers(self, stack: str) -> dict[str, nn.Module]:
        """Modules in decoder layers, without the layers themselves."""
        depth = stack.count(".") + 2
        return {
            name: module
            for name, module in self.modules.items()
            if name.startswith(f"{stack}.") and name.count(".") >= depth
        }

    def _pattern(self, names: Iterable[str]) -> str:
        """Turn names that differ in the number of a layer, or in one more part, into one."""
        starred = list(dict.fromkeys(map(as_pattern, names)))
        joined = starred[0] if len(starred) == 1 else _joined(starred)
        if joined is None:
            raise ValueError(
                f"modules of one kind have unlike names in this {self.kind}, "
                f"{', '.join(map(repr, starred))}; {_REMEDY}"
            )
        return self._relative(joined)

    def _relative(self, name: str) -> str:
        prefix = base_model_prefix(self.model)
        return name.removeprefix(f"{prefix}.") if prefix else name


def _expected_moe_layers(config: Any) -> int | None:
    """Say how many layers have experts by fields that more than one architecture has.

    A field counts only where the class of the config declares it. A config.json may hold fields of
    another architecture, which transformers keeps and its model never reads.
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


def _as_code(plan: ModelPlan, unknown: str) -> str:
    """Write a plan as its user would, with one field left to fill in."""
    said = [repr(plan.model_type)]
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name == unknown:
            said.append(f"{unknown}=...")
        elif field.name not in ("model_type", "origin") and value not in (field.default, {}):
            said.append(f"{field.name}={value!r}")
    return f"ModelPlan({', '.join(said)})"


def _above(name: str) -> Iterator[str]:
    """Name all modules that hold one."""
    while name := name.rpartition(".")[0]:
        yield name


def _rows_of_stack(experts: nn.Module) -> int:
    sizes = [int(p.shape[0]) for p in experts.parameters(recurse=False) if p.dim() == 3]
    return sizes[0] if sizes else 0


def is_attention(module: nn.Module) -> bool:
    """Return whether a module calls transformers' attention interface."""
    return calls(module, _ATTENTION_INTERFACE)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module mixes tokens of a sequence past the attention interface."""
    if any(isinstance(one, _CONVOLUTIONS) for one in (module, *own_children(module))):
        return True
    return _looks_along_the_sequence(module) and not any(map(is_attention, module.modules()))


def _looks_along_the_sequence(module: nn.Module) -> bool:
    return not forward_arguments(module).isdisjoint(_SEQUENCE_ARGUMENTS)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_rows(parameter: nn.Parameter, rows: int) -> bool:
    return parameter.dim() == 2 and parameter.shape[0] == rows


def _joined(names: Iterable[str]) -> str | None:
    """Return the pattern of names that differ in one part alone; None where there is none."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return None
    columns = [set(column) for column in zip(*parts, strict=True)]
    if sum(len(column) > 1 for column in columns) != 1:
        return None
    return ".".join(next(iter(column)) if len(column) == 1 else "*" for column in columns)
