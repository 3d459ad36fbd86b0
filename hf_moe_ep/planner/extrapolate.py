"""Extrapolate a step of a model with n layers from steps with 4 and with 5 layers.

If all layers are alike, a plan runs the model only with 4 and with 5 layers. A step is cut into
phases: before the layers, the forward and the backward of each layer, the head, the optimizer. The
plan keeps the phases of the first two and the last two layers, because these layers have other
neighbours than the layers in the middle. A phase has the number of its layer, counted from the
nearer end (-1 is the last layer). Each additional layer of the model adds the same number of bytes
to a phase, because all layers keep the same number of bytes for later phases:

    n layers   forward 0  1 ..  -2  -1  head | backward head  -1  -2 ..  1  0 | optimizer
    value(n) = value(4) + (n - 4) * (value(5) - value(4))

Example: a phase with 100 bytes at 4 layers and 110 bytes at 5 layers has 100 + 44 * 10 = 540
bytes at 48 layers. The bytes of a layer in the middle lie between the bytes of the first and the
last layer, so the peak of the step is at one of the two ends.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hf_moe_ep.architectures import find_parts
from hf_moe_ep.planner.held import PlanRequest, Unsharded
from hf_moe_ep.planner.work import Phase, StepWork
from hf_moe_ep.upstream.models import text_config

# The numbers of layers of the two short models that run.
FEW_LAYERS = (4, 5)
# Config fields with the number of dense layers before the first MoE layer.
DENSE_LAYER_FIELDS = ("first_k_dense_replace", "num_dense_layers")


def choose_layers_to_run(request: PlanRequest) -> tuple[int, ...]:
    """Return how many layers to run for a plan: (4, 5), or the number of all layers.

    The result is (4, 5) if the model has more than 5 layers and all layers are alike. The result
    does not depend on the layout. A head for multi-token prediction adds its layers, which are
    never like the other layers, because the output head runs before them.
    """
    layers: int = text_config(request.config).num_hidden_layers
    if request.mtp_layers:
        return (layers + request.mtp_layers,)
    return FEW_LAYERS if layers > FEW_LAYERS[-1] and _are_layers_alike(request) else (layers,)


def keep_layers(config: Any, layers: int, *, last: bool = False) -> Any:
    """Copy a config and keep its first `layers` layers, or its last layers with `last`.

    Lists with an entry per layer are cut, and the numbers of dense layers are adapted.
    """
    short = copy.deepcopy(config)
    text = text_config(short)
    old_layers = text.num_hidden_layers
    first = old_layers - layers if last else 0
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == old_layers:
            setattr(text, name, value[first : first + layers])
        elif name in DENSE_LAYER_FIELDS and isinstance(value, int):
            setattr(text, name, max(value - first, 0))
        elif name == "mlp_only_layers" and value:
            setattr(text, name, [index - first for index in value if index >= first])
    text.num_hidden_layers = layers
    return short


def _are_layers_alike(request: PlanRequest) -> bool:
    """Return True if all layers have the same modules, sizes and settings."""
    return len(set(map(_describe_layer, Unsharded.of(request).units.layers))) == 1


def describe_layers(model: nn.Module) -> list[str]:
    """Return the modules, sizes and settings of each layer of a model, as text to compare."""
    return [_describe_layer(layer) for layer in find_parts(model).layers]


def _describe_layer(layer: nn.Module) -> str:
    settings = [
        (
            path,
            type(module).__name__,
            {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)},
            {
                name: value
                for name, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and "idx" not in name
            },
        )
        for path, module in layer.named_modules()
    ]
    return str(settings)


def extrapolate_bytes(few: Sequence[int], layers: int) -> int:
    """Extrapolate bytes from 4 and 5 layers: extrapolate_bytes([100, 110], 48) is 540."""
    (first, second), (first_bytes, second_bytes) = FEW_LAYERS, few
    return first_bytes + (layers - first) * (second_bytes - first_bytes) // (second - first)


def name_layers_from_ends(phases: Sequence[str], layers: int) -> dict[str, str]:
    """Map names that count layers from the nearer end to the phase names of a model.

    With 5 layers, "layer 0" and "layer 1" keep their names, "layer -2" and "layer -1" stand for
    "layer 3" and "layer 4", and "layer 2" is left out. With 4 layers, "layer -2" and "layer -1"
    stand for "layer 2" and "layer 3".
    """
    names: dict[str, str] = {}
    for name in phases:
        before, layer, number = name.rpartition("layer ")
        if not layer:
            names[name] = name
            continue
        index = int(number)
        if index < 2 and index < layers - 1:
            names[f"{before}layer {index}"] = name
        if index > 0 and index >= layers - 2:
            names[f"{before}layer {index - layers}"] = name
    return names


def extrapolate_peaks(
    few: Sequence[Mapping[str, int]], parts: Sequence[Mapping[str, Mapping[str, int]]], layers: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Extrapolate the peak of each phase, and the bytes of each kind at that peak."""
    maps = [
        name_layers_from_ends(list(peaks), number)
        for peaks, number in zip(few, FEW_LAYERS, strict=True)
    ]
    all_peaks: dict[str, int] = {}
    all_parts: dict[str, dict[str, int]] = {}
    for name in maps[0]:
        keys = [names[name] for names in maps]
        two_peaks = [peaks[key] for peaks, key in zip(few, keys, strict=True)]
        all_peaks[name] = extrapolate_bytes(two_peaks, layers)
        two_parts = [part[key] for part, key in zip(parts, keys, strict=True)]
        kinds = dict.fromkeys(kind for part in two_parts for kind in part)
        all_parts[name] = {
            k: extrapolate_bytes([p.get(k, 0) for p in two_parts], layers) for k in kinds
        }
    return all_peaks, all_parts


def extrapolate_work(few: Sequence[StepWork], layers: int) -> StepWork:
    """Extrapolate the work of a step.

    The phases of the first two and the last two layers are copied from the model with 5 layers. Its
    middle layer stands for all layers between them (`Phase.times`). Each additional layer adds the
    difference between the two models to every other phase.
    """
    first, second = few
    phases: dict[str, Phase] = {}
    for name, phase in second.phases.items():
        before, layer, number = name.rpartition("layer ")
        if not layer:
            shorter, steps = first.phases[name], layers - FEW_LAYERS[0]
            phases[name] = Phase(
                _extrapolate_counts(shorter.operators, phase.operators, steps),
                _extrapolate_counts(shorter.collectives, phase.collectives, steps),
            )
        elif 2 <= int(number) < FEW_LAYERS[1] - 2:
            phases[name] = replace(phase, times=layers - FEW_LAYERS[0])
        elif int(number) >= FEW_LAYERS[1] - 2:
            phases[f"{before}layer {int(number) + layers - FEW_LAYERS[1]}"] = phase
        else:
            phases[name] = phase
    return StepWork(phases)


def _extrapolate_counts(first: Any, second: Any, steps: int) -> Any:
    """Return `first + steps * (second - first)` for the count of each item.

    An operator over all parameters, such as the step of an optimizer, has another size in each of
    the two models. The smaller operator then gets a negative count, so sums over all items are
    right.
    """
    first_counts, second_counts = dict(first), dict(second)
    counts = {}
    for item in {**first_counts, **second_counts}:
        count = first_counts.get(item, 0)
        counts[item] = count + steps * (second_counts.get(item, 0) - count)
    return tuple((item, count) for item, count in counts.items() if count)
