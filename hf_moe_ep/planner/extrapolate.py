"""From a step of 4 and of 5 layers to a step of all layers.

Where all layers are alike, the plan runs models of 4 and of 5 layers only. A step is cut into
stretches: before the layers, one per layer and direction, the head, the optimizer. The first two
and the last two layers have neighbours of their own, so they are kept as they are, named by their
number from either end. All layers between are alike. What a stretch has in memory grows by the same
amount with each layer of the model, because earlier layers leave behind the same:

    n layers   forward 0  1 ..  -2  -1  head | backward head  -1  -2 ..  1  0 | optimizer
    value(n) = value(4) + (n - 4) * (value(5) - value(4))

Example: a stretch with 100 bytes at 4 layers and 110 at 5 layers has 100 + 44 * 10 = 540 bytes at
48 layers. No layer in the middle has more than both ends, so the peak is at an end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hf_moe_ep.planner.held import PlanRequest, Unsharded
from hf_moe_ep.planner.work import StepWork, Stretch
from hf_moe_ep.upstream.models import text_config

# The numbers of layers that run.
FEW = (4, 5)


def layers_to_run(request: PlanRequest) -> tuple[int, ...]:
    """Return the numbers of layers to run for plans of a model, in any layout.

    (4, 5) for a longer model whose layers are all alike; else the model's own number.
    """
    layers: int = text_config(request.config).num_hidden_layers
    return FEW if layers > FEW[-1] and _all_layers_alike(request) else (layers,)


def with_layers(config: Any, layers: int) -> Any:
    """Copy a config and set its number of layers; lists with an entry per layer are cut."""
    short = copy.deepcopy(config)
    text = text_config(short)
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return short


def _all_layers_alike(request: PlanRequest) -> bool:
    """Return True if all layers have the same modules, sizes and settings."""
    model = Unsharded.of(request)
    return len({_layer_description(layer) for layer in model.units.layers}) == 1


def _layer_description(layer: nn.Module) -> str:
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


def bytes_at(few: Sequence[int], layers: int) -> int:
    """Extrapolate a number of bytes; bytes_at([100, 110], 48) is 540."""
    (first, second), (at_first, at_second) = FEW, few
    return at_first + (layers - first) * (at_second - at_first) // (second - first)


def names_from_ends(stretches: Sequence[str], layers: int) -> dict[str, str]:
    """Map names counted from either end to the stretches of a model of `layers` layers.

    With 5 layers, "layer 0" and "layer 1" keep their names, 3 and 4 are "layer -2" and "layer -1",
    and layer 2 is left out. With 4 layers, layers 2 and 3 are "layer -2" and "layer -1".
    """
    found: dict[str, str] = {}
    for name in stretches:
        before, layer, number = name.rpartition("layer ")
        if not layer:
            found[name] = name
            continue
        index = int(number)
        if index < 2 and index < layers - 1:
            found[f"{before}layer {index}"] = name
        if index > 0 and index >= layers - 2:
            found[f"{before}layer {index - layers}"] = name
    return found


def peaks_at(
    few: Sequence[Mapping[str, int]], parts: Sequence[Mapping[str, Mapping[str, int]]], layers: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Extrapolate the peak of each stretch, and the bytes of each kind at that peak."""
    names = [names_from_ends(list(one), number) for one, number in zip(few, FEW, strict=True)]
    peaks: dict[str, int] = {}
    kinds: dict[str, dict[str, int]] = {}
    for name in names[0]:
        at = [of[name] for of in names]
        peaks[name] = bytes_at([one[key] for one, key in zip(few, at, strict=True)], layers)
        of_few = [one[key] for one, key in zip(parts, at, strict=True)]
        known = dict.fromkeys(kind for one in of_few for kind in one)
        kinds[name] = {k: bytes_at([one.get(k, 0) for one in of_few], layers) for k in known}
    return peaks, kinds


def work_at(few: Sequence[StepWork], layers: int) -> StepWork:
    """Extrapolate the work of a step.

    The stretches of layers at both ends are those of the larger model. One layer in its middle
    stands for all layers between (`Stretch.times`). Every other stretch grows by the difference of
    the two models with each layer.
    """
    first, second = few
    found: dict[str, Stretch] = {}
    for name, stretch in second.stretches.items():
        before, layer, number = name.rpartition("layer ")
        if not layer:
            other, steps = first.stretches[name], layers - FEW[0]
            found[name] = Stretch(
                _counts_at(other.operators, stretch.operators, steps),
                _counts_at(other.collectives, stretch.collectives, steps),
            )
        elif 2 <= int(number) < FEW[1] - 2:
            found[name] = replace(stretch, times=layers - FEW[0])
        elif int(number) >= FEW[1] - 2:
            found[f"{before}layer {int(number) + layers - FEW[1]}"] = stretch
        else:
            found[name] = stretch
    return StepWork(found)


def _counts_at(first: Any, second: Any, steps: int) -> Any:
    """Return `first + steps * (second - first)` for the number of times that each item occurs.

    An operator over all parameters, as an optimizer's, differs in size between both models. The
    smaller one then occurs a negative number of times, and sums are right.
    """
    at_first, at_second = dict(first), dict(second)
    found = {
        one: at_first.get(one, 0) + steps * (at_second.get(one, 0) - at_first.get(one, 0))
        for one in {**at_first, **at_second}
    }
    return tuple((one, number) for one, number in found.items() if number)
