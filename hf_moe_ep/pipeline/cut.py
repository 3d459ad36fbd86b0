"""Cut a model into pipeline stages: choose the layers of each stage, and remove all others.

    assign_layers_to_stages  returns the layers of each stage, from the config or divided evenly
    map_names_to_stages      returns the stage that holds each parameter and each buffer
    cut_model                replaces the parts of other stages by stand-ins (`stage.py`)
    select_parts_of_stage    returns the `Parts` (`architectures.py`) of the modules that are left

Every stage gets consecutive layers. The first stage also holds the embedding, the last stage the
final norm and the head. All other modules, such as rotary embeddings, have no parameters and stay
on every stage. The first and the last stage each hold a copy of a tied embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.pipeline.stage import (
    Boundary,
    LayerAfter,
    LayerBefore,
    NoEmbedding,
    NoHead,
    NoNorm,
    Stage,
    WholeTensor,
    return_zero_loss,
)
from hf_moe_ep.state import ModelState, PackageHook
from hf_moe_ep.upstream.adapters import wraps_for_adapters
from hf_moe_ep.upstream.module_names import get_canonical_name, get_stock_name
from hf_moe_ep.upstream.modules import get_own_children


def assign_layers_to_stages(num_layers: int, config: ParallelConfig) -> list[range]:
    """Return the indices of the layers of each stage.

    If the layers are divided evenly, the first stages get one layer more than the others, because
    the last stage also computes the head.

    Raises:
        ValueError: `pp_layers` does not add up to the number of layers, or there are more stages
            than layers.
    """
    pp_size = config.pp_size or 1
    if pp_size > num_layers:
        raise ValueError(
            f"pp_size ({pp_size}) needs at least one layer per stage, but the model has "
            f"{num_layers} layers; try pp_size={num_layers} or less"
        )
    counts = config.pp_layers
    if counts is None:
        counts = divide_evenly(num_layers, pp_size)
    if len(counts) != pp_size or sum(counts) != num_layers:
        raise ValueError(
            f"pp_layers={counts} gives {sum(counts)} layers to {len(counts)} stages, but the model "
            f"has {num_layers} layers and pp_size is {pp_size}; the numbers must add up to "
            f"{num_layers}"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(pp_size)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def divide_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divide layers over stages; the first stages get one layer more than the others."""
    count, more = divmod(num_layers, num_stages)
    return tuple(count + (stage < more) for stage in range(num_stages))


def map_names_to_stages(
    model: nn.Module, parts: Parts, stages: list[range]
) -> dict[str, int | None]:
    """Return the stage that holds each parameter and buffer, by name; None if every stage holds it.

    A tied weight is listed under each of its names.
    """
    names = {id(module): name for name, module in model.named_modules()}
    prefixes: dict[str, int] = {}
    for stage, indices in enumerate(stages):
        for index in indices:
            prefixes[f"{names[id(parts.layers[index])]}."] = stage
    if parts.embedding is not None:
        prefixes[f"{names[id(parts.embedding)]}."] = 0
    last = len(stages) - 1
    for module in (*parts.final_norm, parts.head):
        if module is not None:
            prefixes[f"{names[id(module)]}."] = last
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    return {name: _find_stage(name, prefixes) for name in (*parameters, *buffers)}


def _find_stage(name: str, prefixes: dict[str, int]) -> int | None:
    # To look up each prefix of a name is faster than to compare the name with every layer.
    parts = name.split(".")
    for end in range(1, len(parts)):
        stage = prefixes.get(".".join(parts[:end]) + ".")
        if stage is not None:
            return stage
    return None


def list_parameters_outside(model: nn.Module, parts: Parts) -> list[str]:
    """Return the names of the parameters that belong to no layer, embedding, final norm or head."""
    stages = map_names_to_stages(model, parts, [range(len(parts.layers))])
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in parameters if stages[name] is None]


def cut_model(
    model: nn.Module, parts: Parts, state: ModelState, index: int, stages: list[range]
) -> Stage:
    """Remove everything from a model that belongs to other stages than `index`, in place."""
    size, own = len(stages), stages[index]
    boundary = Boundary(index == size - 1)
    names = {id(module): name for name, module in model.named_modules()}
    stage = Stage(index, size, own, len(parts.layers), boundary)
    stock_names = {id(module): get_stock_name(name) for name, module in parts.root.named_modules()}
    stage.moe_names = tuple(stock_names[id(module)] for module in parts.experts.values())
    stage.has_adapters = any(map(wraps_for_adapters, model.modules()))
    stage.tensors = _list_tensors(model, map_names_to_stages(model, parts, stages))
    if parts.tied and index in (0, size - 1):
        owner = parts.embedding if index == 0 else parts.head
        _record_tied_weight(model, stage, parts, owner)
    stand_ins: dict[int, nn.Module] = {}
    for number, layer in enumerate(parts.layers):
        if number < own.start:
            stand_ins[id(layer)] = LayerBefore(layer, boundary)
        elif number >= own.stop:
            stand_ins[id(layer)] = LayerAfter(layer, boundary)
    if index > 0 and parts.embedding is not None:
        stand_ins[id(parts.embedding)] = NoEmbedding(boundary)
    if index < size - 1:
        stand_ins |= {id(norm): NoNorm() for norm in parts.final_norm}
        stand_ins[id(parts.head)] = NoHead()
        setattr(parts.causal_lm, "_loss_function", return_zero_loss)  # noqa: B010  private to ruff
    _replace_children(model, stand_ins)
    parts.layers[own.stop - 1].register_forward_hook(CheckOutput(names[id(parts.layers[own[-1]])]))
    _drop_references(model, parts, state, stage)
    return stage


def _list_tensors(model: nn.Module, stage_of: dict[str, int | None]) -> dict[str, WholeTensor]:
    """List the tensors that checkpoints hold, by name. A tied weight has its first name."""
    tensors: dict[str, WholeTensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            stage = stage_of[name] or 0
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[get_canonical_name(name)] = WholeTensor(
                tuple(tensor.shape), tensor.dtype, stage, is_parameter
            )
    return tensors


def _record_tied_weight(model: nn.Module, stage: Stage, parts: Parts, owner: Any) -> None:
    """Record this stage's copy of the tied weight, before the other copy is removed."""
    shared = {id(p) for p in parts.embedding.parameters()} if parts.embedding else set()
    shared &= {id(p) for p in parts.head.parameters()} if parts.head else set()
    for module in owner.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                stage.tied = module, name
    if stage.index == 0:
        return
    first_names = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in shared and name != first_names[id(parameter)]:
            stage.aliases[get_canonical_name(name)] = get_canonical_name(first_names[id(parameter)])


def _replace_children(model: nn.Module, stand_ins: dict[int, nn.Module]) -> None:
    """Replace each child whose id is in `stand_ins`. The new module gets its training mode."""
    for module in list(model.modules()):
        children = get_own_children(module)
        for name, child in list(children.items()):
            if child is not None and id(child) in stand_ins:
                children[name] = stand_ins[id(child)].train(child.training)


def _drop_references(model: nn.Module, parts: Parts, state: ModelState, stage: Stage) -> None:
    """Drop all references of the state to removed modules, so that their memory is freed."""
    left = {id(module) for module in model.modules()}
    state.undo = [item for item in state.undo if id(item[0]) in left]
    state.relied_on = [item for item in state.relied_on if id(item.module) in left]
    kept = {id(experts) for experts in parts.experts.values() if id(experts) in left}
    for layer, experts in zip(state.moe_layers, parts.experts.values(), strict=True):
        if id(experts) not in kept:
            layer.correction, layer.shared = None, None


class CheckOutput(PackageHook):
    """Forward hook of a stage's last layer: raises ValueError if the output is not one tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"{self.name} ({type(layer).__name__}) returns a {type(output).__name__}, but a "
                f"pipeline stage passes on one tensor of hidden states; leave pp_size at 1"
            )


def select_parts_of_stage(parts: Parts, stage: Stage) -> Parts:
    """Return the parts of the model that belong to this stage."""
    own_layers = tuple(parts.layers[index] for index in stage.layers)
    own = {id(module) for layer in own_layers for module in layer.modules()}
    return replace(
        parts,
        layers=own_layers,
        experts={name: module for name, module in parts.experts.items() if id(module) in own},
        adapted_experts={
            index - stage.layers.start: modules
            for index, modules in parts.adapted_experts.items()
            if index in stage.layers
        },
        attention=tuple(module for module in parts.attention if id(module) in own),
        mixers=tuple(parts.mixers[index] for index in stage.layers),
        embedding=parts.embedding if stage.is_first else None,
        final_norm=parts.final_norm if stage.is_last else (),
        head=parts.head if stage.is_last else None,
        tied=False,
    )
