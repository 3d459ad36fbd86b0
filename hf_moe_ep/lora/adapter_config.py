r"""Convert adapter_config.json between LoRA on stacked experts and on single experts.

Examples for an adapter with r 8, lora_alpha 16 and two experts, which adapts q_proj as well:

    entry               stacked                         single
    target_modules      [q_proj]                        [q_proj,
                                                         mlp.experts.0.gate_proj,
                                                         mlp.experts.0.up_proj, ...]
    target_parameters   [mlp.experts.gate_up_proj]      null
    rank_pattern        {experts.gate_up_proj: 4}       {experts.\d+\.(gate_proj|up_proj): 4}
    alpha_pattern       {experts.down_proj: 6}          {experts.\d+\.down_proj: 6}
    target_modules      "layers\.0.*q_proj"             [layers.0.self_attn.q_proj, and experts]
    layers_to_transform [0]                             null, and names as in the line before

Single experts get full names, `mlp.experts.0.gate_proj`, because a bare `gate_proj` would also
match layers without experts. No name can be added to target_modules if target_modules is a regular
expression (which SGLang does not accept), or if layers_to_transform or exclude_modules limits
target_modules. In these cases (the last two lines of the table) target_modules becomes a list of
the full names of all modules that the file adapts. In a conversion to stacked experts, the rank
doubles if gate and up have different lora_A. A new entry of alpha_pattern then keeps the scale,
which is alpha / rank (with use_rslora alpha / sqrt(rank)).

The keys of rank_pattern and alpha_pattern are regular expressions for the end of a name. The first
key that matches a name gives its value. A conversion first renames the keys. Then it adds an entry
at the front for every name that would still get a wrong value.

per_expert.py converts the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_moe_ep.lora.names import PARTS, Stack, list_matching_targets
from hf_moe_ep.model_patches.standard import SINGLE_EXPERTS
from hf_moe_ep.upstream.hub import read_object

CONFIG = "adapter_config.json"

# For each stacked parameter: a pattern for the names of its matrices in all experts. The pattern
# matches the part of a name after "experts.".
_IN_EVERY_EXPERT = {"gate_up_proj": r"\d+\.(gate_proj|up_proj)", "down_proj": r"\d+\.down_proj"}
# The ends of keys of rank_pattern and alpha_pattern in the two forms: (stacked, single). A key that
# is a bare down_proj is not changed, because it matches in both forms, and in layers without
# experts.
_KEY_ENDS = (
    ("gate_up_proj", _IN_EVERY_EXPERT["gate_up_proj"]),
    ("experts.down_proj", "experts." + _IN_EVERY_EXPERT["down_proj"]),
    (r"experts\.down_proj", r"experts\." + _IN_EVERY_EXPERT["down_proj"]),
)
_SINGLE_TARGET = re.compile(r"(?P<before>|.*\.)\d+\.(?P<part>gate_proj|up_proj|down_proj)")
_FIELDS = (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))


def find_rank_and_alpha(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank and the alpha that PEFT uses for the module or parameter `name`."""
    rank = _look_up(config.get("rank_pattern") or {}, config["r"], name)
    alpha = _look_up(config.get("alpha_pattern") or {}, config["lora_alpha"], name)
    return rank, alpha


def compute_scale(config: Mapping[str, Any], rank: int, alpha: float) -> float:
    """Compute the scale of the product B A (peft/tuners/lora/layer.py, update_layer)."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def list_expert_patterns(config: Mapping[str, Any]) -> list[str]:
    """List the patterns of experts' names in all architectures to which the adapter can belong.

    If the config names the architecture, the list has one pattern. In all known architectures gate
    and up are one stacked parameter.

    Raises:
        ValueError: the config names an architecture that is not in `SINGLE_EXPERTS`.
    """
    model_type = None
    base = Path(config.get("base_model_name_or_path") or "") / "config.json"
    library = ((config.get("auto_mapping") or {}).get("parent_library") or "").split(".")
    if base.is_file():
        model_type = read_object(base).get("model_type")
    elif library[:2] == ["transformers", "models"]:
        model_type = library[2]
    if model_type not in (None, *SINGLE_EXPERTS):
        known = ", ".join(SINGLE_EXPERTS)
        raise ValueError(
            f"adapters on single experts of {model_type!r} are not supported; supported: {known}"
        )
    return [SINGLE_EXPERTS[model_type]] if model_type else list(SINGLE_EXPERTS.values())


def convert_config_to_single(
    config: Mapping[str, Any], stacks: Sequence[Stack], other_modules: list[str]
) -> dict[str, Any]:
    """Convert a config from stacked to single experts.

    `other_modules` are the modules with LoRA that are not experts.
    """
    result = dict(config)
    expert_targets = list_matching_targets(stack.name for stack in stacks)
    other_parameters, single_targets = [], []
    for target in config["target_parameters"]:
        if target not in expert_targets:
            other_parameters.append(target)
            continue
        prefix, _, parameter = target.rpartition(".")
        prefix = f"{prefix}." if prefix else ""
        for expert in range(stacks[0].num_experts):
            single_targets += [f"{prefix}{expert}.{part}" for part in PARTS[parameter]]
    module_targets = _resolve_module_targets(result, other_modules, other_parameters)
    result["target_modules"] = module_targets + single_targets
    result["target_parameters"] = other_parameters or None
    wanted: dict[str, tuple[int, float, str]] = {}
    for stack in stacks:
        key = rf"{re.escape(stack.experts)}\.{_IN_EVERY_EXPERT[stack.parameter]}"
        wanted |= dict.fromkeys(stack.list_modules(), (stack.rank, stack.alpha, key))
    return _set_patterns(result, wanted, _KEY_ENDS)


def convert_config_to_stacked(
    config: Mapping[str, Any],
    stacks: Sequence[Stack],
    other_modules: list[str],
    growth: Mapping[str, int],
) -> dict[str, Any]:
    """Convert a config from single to stacked experts.

    `growth` maps each stacked parameter to the factor by which its rank grows. lora_dropout becomes
    0, because PEFT supports no dropout on parameters.
    """
    result = _move_experts_to_parameters(config, stacks, other_modules) | {"lora_dropout": 0.0}
    wanted = {}
    for stack in stacks:
        factor = growth[stack.parameter]
        # This alpha keeps the scale.
        alpha = stack.alpha * (math.sqrt(factor) if config.get("use_rslora") else factor)
        wanted[stack.name] = (stack.rank * factor, alpha, stack.short_name)
    return _set_patterns(result, wanted, [(single, stacked) for stacked, single in _KEY_ENDS])


def _move_experts_to_parameters(
    config: Mapping[str, Any], stacks: Sequence[Stack], other_modules: list[str]
) -> dict[str, Any]:
    """Move the experts from target_modules to target_parameters."""
    result = dict(config)
    needs_full_names = _needs_full_names(config)
    expert_targets = list_matching_targets(
        module for stack in stacks for module in stack.list_modules()
    )
    other_targets = list_matching_targets(other_modules)
    parameters, modules = list(config.get("target_parameters") or []), []
    for target in _resolve_module_targets(result, other_modules, parameters):
        single = _SINGLE_TARGET.fullmatch(target)
        if single and target in expert_targets:
            parameter = single["part"] if single["part"] in PARTS else "gate_up_proj"
            parameters.append(f"{single['before']}{parameter}")
        elif target in other_targets or target not in expert_targets:
            modules.append(target)
    num_layers = len({stack.experts for stack in stacks})
    for stack in stacks:
        if list_matching_targets([stack.name]) & set(parameters):
            continue
        num_adapted = sum(stack.parameter == other.parameter for other in stacks)
        in_all_layers = num_adapted == num_layers and not needs_full_names
        parameters.append(stack.short_name if in_all_layers else stack.name)
    result["target_modules"] = modules
    result["target_parameters"] = list(dict.fromkeys(parameters))
    return result


def _needs_full_names(config: Mapping[str, Any]) -> bool:
    """Return True if target_modules must become a list of full names; the module says when."""
    limited = config.get("layers_to_transform") is not None or config.get("exclude_modules")
    return bool(limited) or isinstance(config.get("target_modules"), str)


def _resolve_module_targets(
    config: dict[str, Any], other_modules: list[str], parameters: list[str]
) -> list[str]:
    """Return target_modules as a list without limits.

    The entries of `config` that limit target_modules are applied and set to None.

    `parameters` are the targets that stay in target_parameters. If full names are needed, the
    modules of these parameters are left out of the list.
    """
    if not _needs_full_names(config):
        return list(config.get("target_modules") or [])
    for key in ("layers_to_transform", "layers_pattern", "exclude_modules"):
        config[key] = None
    owners = {target.rpartition(".")[0] for target in parameters}
    return [name for name in other_modules if not list_matching_targets([name]) & owners]


def _set_patterns(
    config: dict[str, Any],
    wanted: Mapping[str, tuple[int, float, str]],
    ends: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Set rank_pattern and alpha_pattern so that every name gets its rank and its alpha.

    `wanted` maps each name to (rank, alpha, the key of a new entry). `ends` has pairs (old, new): a
    key that ends in `old` is renamed to end in `new`.
    """
    for index, (field, default) in enumerate(_FIELDS):
        pattern = {}
        for key, value in (config.get(field) or {}).items():
            pattern[_rename_key(key, ends)] = value
        values = {name: (entry[index], entry[2]) for name, entry in wanted.items()}
        config[field] = _add_missing_entries(pattern, config[default], values)
    return config


def _rename_key(key: str, ends: Sequence[tuple[str, str]]) -> str:
    for old, new in ends:
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def _add_missing_entries(
    pattern: dict[str, Any], default: Any, wanted: Mapping[str, tuple[Any, str]]
) -> dict[str, Any]:
    """Add entries at the front until every name of `wanted`, {name: (value, key)}, gets its value.

    A new entry can match another name, which had the right value before and then needs an entry of
    its own. If a key is already used, the new key is the whole name, which matches no other name.
    """
    is_complete = False
    while not is_complete:
        is_complete = True
        for name, (value, key) in wanted.items():
            if _look_up(pattern, default, name) != value:
                key = re.escape(name) if key in pattern else key
                other_entries = {k: v for k, v in pattern.items() if k != key}
                pattern = {key: value, **other_entries}
                is_complete = False
    return pattern


def _look_up(pattern: Mapping[str, Any], default: Any, name: str) -> Any:
    """Return the value of the first key that matches the end of `name` (peft/utils/other.py)."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default
