"""LoRA on stacked experts <-> LoRA on each expert's own matrices: names, tensors and config.

PEFT keeps LoRA on a stacked parameter (`target_parameters`; rank r, E experts) as

    lora_A (E * r, in)   expert slowest: row e * r + i is row i of expert e
    lora_B (out, r * E)  expert fastest: column i * E + e is column i of expert e

(peft/tuners/lora/layer.py, ParamWrapper.get_delta_weight), and nests one wrapper per parameter, in
the order of `named_parameters`: gate_up_proj is `experts.base_layer.lora_A`, down_proj, the outer
one, `experts.lora_A`. Keys do not say which is which, shapes always do: gate_up maps H to 2F, down
F to H, and no sizes fit both ways round. Servers that read single experts only ignore such files
without a word (vllm-project/vllm#41384, sgl-project/sglang#27381). With E = 2, r = 1 and gate_up
A = [a0; a1], B = [[g0, g1], [u0, u1]] they want

    experts.0.gate_proj  A = a0, B = g0        experts.1.gate_proj  A = a1, B = g1
    experts.0.up_proj    A = a0, B = u0        experts.1.up_proj    A = a1, B = u1

Bytes move, nothing is computed. Back, an A that gate and up share is kept once; two that differ
become rank 2r with A = [a_gate; a_up], B block diagonal, and an alpha that keeps the scale.

Not here: files (adapter_files.py), merging into weights, DoRA.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.architectures import known_architectures
from hf_moe_ep.plan import ModelPlan, matches

CONFIG = "adapter_config.json"
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

_LORA = re.compile(r"(.+?)\.lora_(?:embedding_)?[AB](?:\.|$)")
_STACKED = re.compile(r"(.+\.experts)((?:\.base_layer)*)\.lora_[AB]\.weight")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.lora_[AB]\.weight")
_SINGLE_TARGET = re.compile(r"(|.*\.)\d+\.(gate_proj|up_proj|down_proj)")
# How a key of rank_pattern ends that finds a parameter's matrices in every expert.
_TAILS = {"gate_up_proj": r"\d+\.(gate_proj|up_proj)", "down_proj": r"\d+\.down_proj"}
_ENDINGS = {  # a bare down_proj finds both forms, and layers without experts: it stays
    "gate_up_proj": _TAILS["gate_up_proj"],
    "experts.down_proj": "experts." + _TAILS["down_proj"],
    r"experts\.down_proj": r"experts\." + _TAILS["down_proj"],
}
Read = Callable[[str], Tensor]
Tensors = Callable[[Read], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Adapter:
    """Its tensors by their names after PEFT's prefix: `shapes` on the meta device, `read` loads."""

    config: dict[str, Any]
    shapes: dict[str, Tensor]
    read: Read
    prefix: str
    metadata: dict[str, str]


@dataclass(frozen=True)
class Stack:
    """LoRA on one stacked parameter of one layer; `rank` and `alpha` of a single expert's."""

    experts: str  # the module
    parameter: str
    num_experts: int
    rank: int
    alpha: float
    wrapper: str

    @property
    def name(self) -> str:
        return f"{self.experts}.{self.parameter}"

    def modules(self) -> list[list[str]]:
        """Of each expert, the modules it has instead of the parameter."""
        parts, numbers = PARTS[self.parameter], range(self.num_experts)
        return [[f"{self.experts}.{e}.{part}" for part in parts] for e in numbers]


def to_single(adapter: Adapter) -> tuple[Tensors, dict[str, Any], list[Stack]]:
    """Tensors of single experts, the config that fits them, and the stacks they come from."""
    stacks = _find_stacks(adapter)

    def tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
        for stack in stacks:
            a, b = (read(f"{stack.wrapper}.lora_{factor}.weight") for factor in "AB")
            a_ERI = a.unflatten(0, (stack.num_experts, -1))
            b_EOR = b.unflatten(1, (-1, stack.num_experts)).permute(2, 0, 1).contiguous()
            for modules, a_RI, b_OR in zip(stack.modules(), a_ERI, b_EOR):
                for module, part_OR in zip(modules, b_OR.chunk(len(modules))):
                    yield f"{module}.lora_A.weight", a_RI
                    yield f"{module}.lora_B.weight", part_OR

    config, names = dict(adapter.config), _suffixes(stack.name for stack in stacks)
    experts, others = [], []
    for target in config["target_parameters"]:
        parameter = target.rpartition(".")[2]
        if target not in names:
            others.append(target)
            continue
        for e in range(stacks[0].num_experts):
            experts += [f"{target.removesuffix(parameter)}{e}.{part}" for part in PARTS[parameter]]
    config["target_modules"] = _module_targets(adapter, config, others) + experts
    config["target_parameters"] = others or None
    values = {
        module: (stack.rank, stack.alpha, rf"{re.escape(stack.experts)}\.{_TAILS[stack.parameter]}")
        for stack in stacks
        for modules in stack.modules()
        for module in modules
    }
    return tensors, _with_patterns(config, values, _ENDINGS), stacks


def _find_stacks(adapter: Adapter) -> list[Stack]:
    stacks: list[Stack] = []
    fix = f"correct r or rank_pattern in {CONFIG}"
    for experts, found in _find(adapter, _STACKED, "stacked").items():
        for parameter, wrapper in _parameters(adapter, experts, sorted(set(found))).items():
            rank, alpha = rank_and_alpha(adapter.config, f"{experts}.{parameter}")
            (rows, _), (out, columns) = _sizes(adapter, wrapper)
            if rows % rank or rows != columns or out % len(PARTS[parameter]):
                raise ValueError(
                    f"{wrapper}: lora_A has {rows} rows, lora_B {columns} columns and {out} rows; "
                    f"at rank {rank} that is no whole number of experts or halves; {fix}"
                )
            stack = Stack(experts, parameter, rows // rank, rank, alpha, wrapper)
            if stacks and stack.num_experts != stacks[0].num_experts:
                raise ValueError(
                    f"{wrapper} has {stack.num_experts} experts at rank {rank}, "
                    f"{stacks[0].wrapper} has {stacks[0].num_experts}; {fix}"
                )
            stacks.append(stack)
    return stacks


def _parameters(adapter: Adapter, experts: str, wrappers: list[str]) -> dict[str, str]:
    """Which wrapper adapts which parameter: by shapes where there are two, else by the config."""
    targets = adapter.config.get("target_parameters") or []
    named = [name for name in PARTS if _suffixes([f"{experts}.{name}"]) & set(targets)]
    if len(named) != len(wrappers):
        raise ValueError(
            f"{experts} has LoRA on {len(wrappers)} parameters, but target_parameters in {CONFIG} "
            f"names {len(named)} of {', '.join(PARTS)}; name those that were trained"
        )
    if len(named) == 1:
        return {named[0]: wrappers[0]}
    for up, down in (wrappers, wrappers[::-1]):  # PEFT's nesting last, for the message
        (_, up_in), (up_out, _) = _sizes(adapter, up)
        (_, down_in), (down_out, _) = _sizes(adapter, down)
        if up_in == down_out and up_out == 2 * down_in:
            return {"gate_up_proj": up, "down_proj": down}
    raise ValueError(
        f"{experts}: {up_in} -> {up_out} and {down_in} -> {down_out} are not H -> 2F and F -> H of "
        f"gate_up_proj and down_proj (PEFT before 0.19 exchanged input and output: merge with it)"
    )


def _sizes(adapter: Adapter, module: str) -> list[torch.Size]:
    return [adapter.shapes[f"{module}.lora_{factor}.weight"].shape for factor in "AB"]


def to_stacked(adapter: Adapter) -> tuple[Tensors, dict[str, Any], list[Stack]]:
    """Tensors of stacked experts, the config that fits them, and the stacks they are."""
    singles = _find_singles(adapter)
    shared = all(
        torch.equal(*(adapter.read(f"{module}.lora_A.weight") for module in modules))
        for stack in singles
        if stack.parameter == "gate_up_proj"
        for modules in stack.modules()
    )

    def tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
        for stack in singles:
            a, b = [], []
            for modules in stack.modules():
                a += [read(f"{module}.lora_A.weight") for module in modules[: 1 if shared else 2]]
                parts = [read(f"{module}.lora_B.weight") for module in modules]
                b.append(torch.cat(parts) if shared else torch.block_diag(*parts))
            yield f"{stack.wrapper}.lora_A.weight", torch.cat(a)
            yield f"{stack.wrapper}.lora_B.weight", torch.stack(b, -1).flatten(1)

    values = {}
    for stack in singles:
        growth = 1 if shared else len(PARTS[stack.parameter])
        alpha = stack.alpha * (math.sqrt(growth) if adapter.config.get("use_rslora") else growth)
        short = re.sub(r".*\.\d+\.", "", stack.name)
        values[stack.name] = (stack.rank * growth, alpha, short)
    config = _fused_targets(adapter, singles) | {"lora_dropout": 0.0}
    back = {new: old for old, new in _ENDINGS.items()}
    return tensors, _with_patterns(config, values, back), singles


def _fused_targets(adapter: Adapter, singles: list[Stack]) -> dict[str, Any]:
    """The config with target_parameters for the experts, and without their target_modules."""
    config = dict(adapter.config)
    of_experts = _suffixes(m for stack in singles for modules in stack.modules() for m in modules)
    of_others = _suffixes(other_modules(adapter))
    explicit = _is_explicit(config)
    parameters, kept = list(config.get("target_parameters") or []), []
    for target in _module_targets(adapter, config, parameters):
        single = _SINGLE_TARGET.fullmatch(target)
        if single and target in of_experts:
            name = single[2] if single[2] in PARTS else "gate_up_proj"
            parameters.append(f"{single[1]}{name}")
        elif target in of_others or target not in of_experts:
            kept.append(target)
    layers = {stack.experts for stack in singles}
    for stack in singles:
        everywhere = sum(stack.parameter == other.parameter for other in singles) == len(layers)
        if not _suffixes([stack.name]) & set(parameters):
            short = everywhere and not explicit
            parameters.append(re.sub(r".*\.\d+\.", "", stack.name) if short else stack.name)
    parameters = list(dict.fromkeys(parameters))
    return config | {"target_modules": kept, "target_parameters": parameters}


def _find_singles(adapter: Adapter) -> list[Stack]:
    config = adapter.config
    for name in ("use_dora", "lora_bias"):
        if config.get(name):
            raise ValueError(f"PEFT has no {name} on stacked experts; merge this adapter instead")
    layers = _find(adapter, _SINGLE, "single")
    num_experts = 1 + max(int(name.split(".")[-2]) for names in layers.values() for name in names)
    stacks = []
    for experts, found in layers.items():
        have = {name.rpartition(".")[2] for name in found}
        parameters = [name for name, parts in PARTS.items() if have & set(parts)]
        for parameter in parameters:
            wrapper = experts if parameter == parameters[-1] else f"{experts}.base_layer"
            first = f"{experts}.0.{PARTS[parameter][0]}"
            stack = Stack(experts, parameter, num_experts, *rank_and_alpha(config, first), wrapper)
            for modules in stack.modules():
                for module, like in zip(modules, stack.modules()[0]):
                    _check_single(adapter, stack, module, like)
            stacks.append(stack)
    return stacks


def _check_single(adapter: Adapter, stack: Stack, module: str, like: str) -> None:
    """The module has LoRA of the stack's rank, of its scale, and of the shapes of `like`."""
    for name, model in ((f"{m}.lora_{f}.weight" for m in (module, like)) for f in "AB"):
        if name not in adapter.shapes or model not in adapter.shapes:
            raise ValueError(
                f"{name if name not in adapter.shapes else model} is missing: stacked experts have "
                f"LoRA on all {stack.num_experts} experts, on gate_proj and up_proj together"
            )
        got, want = adapter.shapes[name], adapter.shapes[model]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(
                f"{name} is {got.dtype} {got.shape}, {model} {want.dtype} {want.shape}"
            )
    value, have = rank_and_alpha(adapter.config, module), _sizes(adapter, module)[0][0]
    if value != (stack.rank, stack.alpha) or have != stack.rank:
        raise ValueError(
            f"{module} has rank {have}, rank and alpha {value} in {CONFIG}, the others of "
            f"{stack.name} {(stack.rank, stack.alpha)}; a stacked parameter has one of each"
        )


def _find(adapter: Adapter, pattern: re.Pattern[str], form: str) -> dict[str, list[str]]:
    """Experts module -> the modules with LoRA on its experts."""
    plans = _plans(adapter.config)
    found: dict[str, list[str]] = {}
    for name in adapter.shapes:
        match = pattern.fullmatch(name)
        if match and any(matches(plan.experts, match[1]) for plan in plans):
            found.setdefault(match[1], []).append(name.rpartition(".lora_")[0])
        elif ".experts." in name and ".lora_" in name:
            places = " or ".join(f"'{plan.experts}'" for plan in plans)
            raise ValueError(f"{name} is not LoRA on {form} experts of {places}; see --to")
    if not found:
        raise ValueError(f"no LoRA on {form} experts in this adapter; see --to")
    return found


def _plans(config: dict[str, Any]) -> list[ModelPlan]:
    """Those the adapter can be for; that gate and up are halves is known of no others."""
    model_type = None
    base = Path(config.get("base_model_name_or_path") or "") / "config.json"
    library = ((config.get("auto_mapping") or {}).get("parent_library") or "").split(".")
    if base.is_file():
        model_type = json.loads(base.read_text(encoding="utf-8")).get("model_type")
    elif library[:2] == ["transformers", "models"]:
        model_type = library[2]
    known = known_architectures()
    if model_type not in (None, *known):
        raise ValueError(f"unknown architecture {model_type!r}; known are: {', '.join(known)}")
    names = [model_type] if model_type else known
    return [importlib.import_module(f"model_patches.{name}").PLAN for name in names]


def _is_explicit(config: dict[str, Any]) -> bool:
    """Whether target_modules cannot be extended by names, and becomes a list of names."""
    limited = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    return bool(limited) or isinstance(config.get("target_modules"), str)


def _module_targets(adapter: Adapter, config: dict[str, Any], parameters: list[str]) -> list[str]:
    """target_modules as a list; `parameters` are targets that stay target_parameters."""
    if not _is_explicit(config):
        return list(config.get("target_modules") or [])
    for key in ("layers_to_transform", "layers_pattern", "exclude_modules"):
        config[key] = None
    owners = {target.rpartition(".")[0] for target in parameters}
    return [name for name in other_modules(adapter) if not _suffixes([name]) & owners]


def other_modules(adapter: Adapter) -> list[str]:
    found = [_LORA.match(name) for name in adapter.shapes if not is_of_experts(name)]
    return sorted({match[1] for match in found if match})


def is_of_experts(name: str) -> bool:
    return bool(_STACKED.fullmatch(name) or _SINGLE.fullmatch(name))


def _with_patterns(
    config: dict[str, Any], values: dict[str, tuple[int, float, str]], endings: dict[str, str]
) -> dict[str, Any]:
    """The config with the ranks and alphas of `values`: {name: (rank, alpha, key to use)}."""
    for index, (field, default) in enumerate((("rank", "r"), ("alpha", "lora_alpha"))):
        pattern: dict[str, Any] = {}
        for key, value in (config.get(f"{field}_pattern") or {}).items():
            old = next((old for old in endings if key.endswith(old)), "")
            pattern[key.removesuffix(old) + endings.get(old, "")] = value
        for _ in range(2):  # an entry added for one layer may hit one that was right before
            for name, (*wanted, key) in values.items():
                if _lookup(pattern, config[default], name) != wanted[index]:
                    key = re.escape(name) if key in pattern else key
                    pattern = {key: wanted[index], **pattern}
        config[f"{field}_pattern"] = pattern
    return config


def rank_and_alpha(config: dict[str, Any], name: str) -> tuple[int, float]:
    rank = _lookup(config.get("rank_pattern") or {}, config["r"], name)
    return rank, _lookup(config.get("alpha_pattern") or {}, config["lora_alpha"], name)


def scale(config: dict[str, Any], rank: int, alpha: float) -> float:
    """What B A is multiplied by (peft/tuners/lora/layer.py, update_layer)."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _lookup(pattern: dict[str, Any], default: Any, name: str) -> Any:
    """The first key that finds the end of `name` wins (peft/utils/other.py, get_pattern_key)."""
    hits = (key for key in pattern if re.match(rf"(.*\.)?({key})$", name))
    return pattern.get(next(hits, ""), default)


def _suffixes(names: Iterable[str]) -> set[str]:
    """All targets that hit one of `names`: PEFT compares whole components at the end."""
    parts = [name.split(".") for name in names]
    return {".".join(part[start:]) for part in parts for start in range(len(part))}
