"""Convert tensors between LoRA on stacked experts and LoRA on the matrices of each expert.

`factors.py` describes PEFT's layout of the factors. PEFT nests one wrapper per parameter, in the
order of `named_parameters`: gate_up_proj has the inner wrapper (`experts.base_layer.lora_A`), and
down_proj has the outer wrapper (`experts.lora_A`). Keys do not name the parameter that a wrapper
adapts, but the shapes of the two wrappers identify it: gate_up maps H to 2F, and down maps F to H.

Servers that read only single experts ignore such files silently (vllm-project/vllm#41384,
sgl-project/sglang#27381). For E = 2 and r = 1, let gate_up_proj have A = [a0; a1] and
B = [[g0, g1], [u0, u1]]. These servers then need

    experts.0.gate_proj  A = a0, B = g0        experts.1.gate_proj  A = a1, B = g1
    experts.0.up_proj    A = a0, B = u0        experts.1.up_proj    A = a1, B = u1

This conversion only copies bytes. In the other direction, an A that gate and up share is stored
once. If gate and up have different A, the stacked A is [a_gate; a_up] with rank 2r, B is block
diagonal, and alpha is changed so that the scale stays the same.

names.py reads keys, adapter_config.py converts the config, and export.py reads and writes files.
DoRA is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from re import Pattern
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.lora.adapter_config import (
    CONFIG,
    convert_config_to_single,
    convert_config_to_stacked,
    find_rank_and_alpha,
    list_expert_patterns,
)
from hf_moe_ep.lora.factors import pack_a, pack_b, stack_a, stack_b
from hf_moe_ep.lora.names import (
    PARTS,
    SINGLE_KEY,
    STACKED_KEY,
    Stack,
    list_matching_targets,
    list_other_modules,
)
from hf_moe_ep.plan import matches

# A `Read` is a function that loads a tensor by its name. A `Tensors` is a function that takes a
# `Read` and yields the names and values of the converted tensors.
Read = Callable[[str], Tensor]
Tensors = Callable[[Read], Iterator[tuple[str, Tensor]]]
_DIRECTIONS = (
    "export_adapter (--to per-expert) reads LoRA on stacked experts, and fuse_adapter (--to fused) "
    "reads LoRA on single experts"
)


@dataclass(frozen=True)
class AdapterFile:
    """An opened adapter folder.

    Attributes:
        config: the contents of adapter_config.json.
        shapes: tensors on the meta device with the shapes and dtypes, by their names without
            `prefix`.
        read: loads one tensor by its name without `prefix`.
        prefix: the prefix that PEFT gives to every name, or "".
        metadata: the metadata of the file with the tensors.
    """

    config: dict[str, Any]
    shapes: dict[str, Tensor]
    read: Read
    prefix: str
    metadata: dict[str, str]

    def get_factor_shapes(self, module: str) -> tuple[torch.Size, torch.Size]:
        """Return the shapes of a module's lora_A and lora_B."""
        lora_a, lora_b = (self.shapes[_make_factor_key(module, factor)] for factor in "AB")
        return lora_a.shape, lora_b.shape

    def read_lora_a(self, module: str) -> Tensor:
        """Load a module's lora_A."""
        return self.read(_make_factor_key(module, "A"))


def _make_factor_key(module: str, factor: str) -> str:
    return f"{module}.lora_{factor}.weight"


def convert_to_single(file: AdapterFile) -> tuple[Tensors, dict[str, Any], list[Stack]]:
    """Convert to single experts. Return the tensors, the config and the stacks of the source."""
    stacks = _find_stacks(file)

    def yield_tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
        for stack in stacks:
            a_EPI = stack_a(read(_make_factor_key(stack.wrapper, "A")), stack.num_experts)
            b_EOP = stack_b(
                read(_make_factor_key(stack.wrapper, "B")), stack.num_experts
            ).contiguous()
            for modules, a_PI, b_OP in zip(stack.list_modules_by_expert(), a_EPI, b_EOP):
                for module, part_OP in zip(modules, b_OP.chunk(len(modules))):
                    yield _make_factor_key(module, "A"), a_PI
                    yield _make_factor_key(module, "B"), part_OP

    config = convert_config_to_single(file.config, stacks, list_other_modules(file.shapes))
    return yield_tensors, config, stacks


def convert_to_stacked(file: AdapterFile) -> tuple[Tensors, dict[str, Any], list[Stack]]:
    """Convert to stacked experts. Return the tensors, the config and the stacks of the result."""
    stacks = _plan_stacks(file)
    shared = _gate_and_up_share_a(file, stacks)

    def yield_tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
        for stack in stacks:
            a_of_experts, b_of_experts = [], []
            for modules in stack.list_modules_by_expert():
                a_of_parts = [read(_make_factor_key(module, "A")) for module in modules]
                b_of_parts = [read(_make_factor_key(module, "B")) for module in modules]
                if shared:
                    a_of_experts.append(a_of_parts[0])
                    b_of_experts.append(torch.cat(b_of_parts))
                else:
                    a_of_experts.append(torch.cat(a_of_parts))
                    b_of_experts.append(torch.block_diag(*b_of_parts))
            yield _make_factor_key(stack.wrapper, "A"), pack_a(torch.stack(a_of_experts))
            yield _make_factor_key(stack.wrapper, "B"), pack_b(torch.stack(b_of_experts))

    growth = {parameter: 1 if shared else len(parts) for parameter, parts in PARTS.items()}
    config = convert_config_to_stacked(file.config, stacks, list_other_modules(file.shapes), growth)
    return yield_tensors, config, stacks


def _gate_and_up_share_a(file: AdapterFile, stacks: list[Stack]) -> bool:
    """Return True if gate and up have equal lora_A in every expert of every layer."""
    return all(
        torch.equal(file.read_lora_a(gate), file.read_lora_a(up))
        for stack in stacks
        if stack.parameter == "gate_up_proj"
        for gate, up in stack.list_modules_by_expert()
    )


def _find_stacks(file: AdapterFile) -> list[Stack]:
    """Find the stacks in a file of stacked experts, and check that their sizes fit the config."""
    stacks: list[Stack] = []
    fix = f"correct r or rank_pattern in {CONFIG}"
    for experts, wrappers in _find_adapted_experts(file, STACKED_KEY, "stacked").items():
        by_parameter = _match_wrappers(file, experts, sorted(set(wrappers)))
        for parameter, wrapper in by_parameter.items():
            rank, alpha = find_rank_and_alpha(file.config, f"{experts}.{parameter}")
            (rows, _), (out, columns) = file.get_factor_shapes(wrapper)
            if rows % rank or rows != columns or out % len(PARTS[parameter]):
                raise ValueError(
                    f"{wrapper}: lora_A has {rows} rows, lora_B has {columns} columns and {out} "
                    f"rows; no number of experts has these sizes at rank {rank}; {fix}"
                )
            stack = Stack(experts, parameter, rows // rank, rank, alpha, wrapper)
            if stacks and stack.num_experts != stacks[0].num_experts:
                raise ValueError(
                    f"{wrapper} has {stack.num_experts} experts at rank {rank}, "
                    f"{stacks[0].wrapper} has {stacks[0].num_experts}; {fix}"
                )
            stacks.append(stack)
    return stacks


def _match_wrappers(file: AdapterFile, experts: str, wrappers: list[str]) -> dict[str, str]:
    """Map each adapted parameter to its wrapper.

    A single wrapper is identified by target_parameters, and two wrappers by their shapes.
    """
    targets = file.config.get("target_parameters") or []
    named = [name for name in PARTS if list_matching_targets([f"{experts}.{name}"]) & set(targets)]
    if len(named) != len(wrappers):
        raise ValueError(
            f"{experts} has LoRA on {len(wrappers)} parameters, but target_parameters in {CONFIG} "
            f"names {len(named)} of {', '.join(PARTS)}; name the parameters that were trained"
        )
    if len(named) == 1:
        return {named[0]: wrappers[0]}
    # PEFT's order is tried last, so that the error below shows the shapes in PEFT's order.
    for up, down in (wrappers, wrappers[::-1]):
        (_, up_in), (up_out, _) = file.get_factor_shapes(up)
        (_, down_in), (down_out, _) = file.get_factor_shapes(down)
        if up_in == down_out and up_out == 2 * down_in:
            return {"gate_up_proj": up, "down_proj": down}
    raise ValueError(
        f"{experts}: {up_in} -> {up_out} and {down_in} -> {down_out} are not H -> 2F and F -> H of "
        f"gate_up_proj and down_proj; if PEFT before 0.19, which exchanged input and output, wrote "
        f"this adapter, merge it with that version of PEFT"
    )


def _plan_stacks(file: AdapterFile) -> list[Stack]:
    """Plan the stacks for a file of single experts, and check that all experts fit into them."""
    for name in ("use_dora", "lora_bias"):
        if file.config.get(name):
            raise ValueError(f"PEFT has no {name} on stacked experts; merge this adapter instead")
    layers = _find_adapted_experts(file, SINGLE_KEY, "single")
    numbers = [int(module.split(".")[-2]) for modules in layers.values() for module in modules]
    num_experts = 1 + max(numbers)
    stacks = []
    for experts, modules in layers.items():
        adapted_parts = {module.rpartition(".")[2] for module in modules}
        parameters = [name for name, parts in PARTS.items() if adapted_parts & set(parts)]
        for parameter in parameters:
            wrapper = experts if parameter == parameters[-1] else f"{experts}.base_layer"
            rank, alpha = find_rank_and_alpha(file.config, f"{experts}.0.{PARTS[parameter][0]}")
            stack = Stack(experts, parameter, num_experts, rank, alpha, wrapper)
            first_expert = stack.list_modules_by_expert()[0]
            for expert in stack.list_modules_by_expert():
                for module, like in zip(expert, first_expert):
                    _check_single(file, stack, module, like)
            stacks.append(stack)
    return stacks


def _check_single(file: AdapterFile, stack: Stack, module: str, like: str) -> None:
    """Raise ValueError if a module has another rank, alpha, shape or dtype than its stack.

    `like` is the same module of the first expert.
    """
    for factor in "AB":
        key, first_key = _make_factor_key(module, factor), _make_factor_key(like, factor)
        if key not in file.shapes or first_key not in file.shapes:
            raise ValueError(
                f"{key if key not in file.shapes else first_key} is missing: stacked experts have "
                f"LoRA on all {stack.num_experts} experts, and on both gate_proj and up_proj"
            )
        tensor, first = file.shapes[key], file.shapes[first_key]
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"{key} is {tensor.dtype} {tensor.shape}, but {first_key} is {first.dtype} "
                f"{first.shape}; a stacked parameter has one dtype, and one shape for all experts"
            )
    in_config = find_rank_and_alpha(file.config, module)
    in_file = file.get_factor_shapes(module)[0][0]
    if in_config != (stack.rank, stack.alpha) or in_file != stack.rank:
        raise ValueError(
            f"{module} has rank {in_file} in its file and rank and alpha {in_config} in {CONFIG}, "
            f"but other modules of {stack.name} have {(stack.rank, stack.alpha)}; a stacked "
            f"parameter has one rank and one alpha"
        )


def _find_adapted_experts(file: AdapterFile, key: Pattern[str], form: str) -> dict[str, list[str]]:
    """Map each experts module to the modules with LoRA on its experts.

    Raises:
        ValueError: there are no such modules; or the name of a module has another form than `form`,
            or is not the name of experts in a known architecture.
    """
    patterns = list_expert_patterns(file.config)
    adapted: dict[str, list[str]] = {}
    for name in file.shapes:
        match = key.fullmatch(name)
        if match and any(matches(pattern, match["experts"]) for pattern in patterns):
            adapted.setdefault(match["experts"], []).append(name.rpartition(".lora_")[0])
        elif ".experts." in name and ".lora_" in name:
            known = " or ".join(f"'{pattern}'" for pattern in patterns)
            raise ValueError(f"{name} is not LoRA on {form} experts of {known}; {_DIRECTIONS}")
    if not adapted:
        raise ValueError(f"this adapter has no LoRA on {form} experts; {_DIRECTIONS}")
    return adapted
