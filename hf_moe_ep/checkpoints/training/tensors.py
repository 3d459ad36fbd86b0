"""Model and optimizer as named tensors that no layout shows in, and back.

    model.<parameter>             parameters (a tied one once, by its first name), buffers
    optimizer.<key>.<parameter>   what the optimizer keeps in the parameter's shape: exp_avg, ...
    everything else               JSON (`plain.py`): scalar state like `step`, options of groups

Sharded tensors are DTensors of global shape, so torch.distributed.checkpoint cuts them for any
other layout. LoRA factors of experts are kept as a sharded model has them, [E, r, in] and
[E, out, r], and packed on the way into a model that is not sharded (`factors.py`).

Not by torch's get_optimizer_state_dict: without a state it makes one by a step with lr 0, which
leaves `step` at 1, so a run saved before its first step would go on with other bias corrections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage.json_values import decode, encode
from hf_moe_ep.lora.computed import stackers
from hf_moe_ep.lora.factors import is_stacked, pack_a, pack_b
from hf_moe_ep.upstream.adapters import adapter_parameters, parameter_factors, wraps_for_adapters
from hf_moe_ep.upstream.models import persistent_buffers
from hf_moe_ep.upstream.module_names import canonical_name, unwrap

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Slot:
    """One tensor of the model: itself, and the way to its form in a file and back."""

    tensor: Tensor
    to_file: Convert | None = None
    from_file: Convert | None = None

    def saved(self, value: Tensor) -> Tensor:
        """`value`, of the shape of `tensor`, as a file has it."""
        return (value if self.to_file is None else self.to_file(value)).contiguous()

    def file_shape(self) -> list[int]:
        """Of the form that a file has."""
        if self.to_file is None:
            return list(self.tensor.shape)
        return list(self.to_file(self.tensor.to("meta")).shape)

    def fit(self, value: Tensor) -> Tensor:
        """`value`, as a file has it, in the shape of `tensor`."""
        return value if self.from_file is None else self.from_file(value)


@dataclass
class NamedState:
    """Tensors by name, and the rest, as `plain.encode` makes it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def index(self) -> dict[str, Any]:
        """Global shape and dtype of every tensor."""
        return {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in self.tensors.items()
        }

    def files(self, limit: int) -> dict[str, int]:
        """Which file each tensor goes to, from 1; the next begins after `limit` bytes."""
        numbers, so_far = {}, 0
        for name, tensor in self.tensors.items():
            numbers[name] = 1 + so_far // limit
            so_far += tensor.numel() * tensor.element_size()
        return numbers


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """What is saved of a model, by name: all of it, or all but the base that PEFT froze."""
    inner = unwrap(model)
    adapted = any(wraps_for_adapters(module) for module in inner.modules())
    of_adapters = adapter_parameters(inner)
    convert = _converters(inner)
    found = {
        canonical_name(name): Slot(p.detach(), *convert.get(id(p), ()))
        for name, p in inner.named_parameters()
        if p.requires_grad or id(p) in of_adapters or not adapted
    }
    return found | {canonical_name(name): Slot(b.detach()) for name, b in persistent_buffers(inner)}


def collect(model: nn.Module, optimizer: Any) -> NamedState:
    """All state of a resharded model and its optimizer; tensors may be the model's own.

    Raises:
        ValueError: the optimizer keeps something that this cannot name or hold.
    """
    state = NamedState()
    scalars: dict[str, Any] = {}
    for name, slot in model_slots(model).items():
        if slot.tensor.ndim:
            state.tensors[f"model.{name}"] = slot.saved(slot.tensor)
        else:
            scalars[name] = encode(slot.tensor, name)
    names, slots = parameter_names(model, optimizer)
    kept: dict[str, Any] = {}
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise ValueError(f"the optimizer keeps {parameter!r} beside its parameters")
        name = names.get(id(parameter), f"a parameter {tuple(parameter.shape)}")
        if name not in slots:
            raise ValueError(
                f"the optimizer keeps state of {name}, which is in none of its groups; put it back "
                f"into one, or del optimizer.state[parameter]"
            )
        kept[name] = {}
        for key, value in values.items():
            where = f"{key} of {name} in {type(optimizer).__name__}"
            if isinstance(value, Tensor) and value.ndim:
                _check_like(where, value, parameter)
                state.tensors[f"optimizer.{key}.{name}"] = slots[name].saved(value.detach())
                kept[name][key] = {"__in_file__": f"optimizer.{key}.{name}"}
            elif isinstance(value, Tensor):
                on = "host" if value.device.type == "cpu" else "parameter"
                kept[name][key] = {"on": on, "value": encode(value.detach(), where)}
            else:
                kept[name][key] = {"value": encode(value, where)}
    groups = [
        {"names": [names[id(p)] for p in group["params"]], "options": _options(group, index)}
        for index, group in enumerate(optimizer.param_groups)
    ]
    state.rest = {
        "kind": kind_of(optimizer),
        "scalars": scalars,
        "optimizer": kept,
        "groups": groups,
    }
    return state


def kind_of(optimizer: Any) -> str:
    """The class of an optimizer, behind Accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def parameter_names(model: nn.Module, optimizer: Any) -> tuple[dict[int, str], dict[str, Slot]]:
    """Names of the optimizer's parameters by id, and their slots by name.

    Raises:
        ValueError: the optimizer has parameters that the model has not.
    """
    inner = unwrap(model)
    convert = _converters(inner)
    names = {id(p): canonical_name(name) for name, p in inner.named_parameters()}
    slots = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"parameter {place} of the optimizer's group {index}, {tuple(p.shape)}, is "
                    f"none of this model's; make the optimizer after apply_ep_fsdp2(model), or "
                    f"give both to accelerator.prepare"
                )
            slots[names[id(p)]] = Slot(p.detach(), *convert.get(id(p), ()))
    return names, slots


def new_moment(slot: Slot, dtype: str, parameter_dtype: str | None) -> Tensor:
    """Room for optimizer state of a parameter, laid out as the file's form of it.

    In the parameter's dtype where it was so when saved, else in the one that it was saved in.
    """
    own = dtype == parameter_dtype
    return torch.zeros_like(
        slot.saved(slot.tensor), dtype=slot.tensor.dtype if own else getattr(torch, dtype)
    )


def put_optimizer(
    model: nn.Module, optimizer: Any, rest: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Replace the optimizer's state and options by what was read."""
    names, slots = parameter_names(model, optimizer)
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        for key, value in decode(saved["options"]).items():
            now = group.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                now.copy_(value)
            else:
                group[key] = value
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in rest["optimizer"]:
                continue
            values = {}
            for key, entry in rest["optimizer"][name].items():
                if "__in_file__" in entry:
                    value = slots[name].fit(tensors[entry["__in_file__"]])
                else:
                    value = decode(entry["value"])
                    if entry.get("on") == "parameter":
                        value = value.to(parameter.device)
                values[key] = value
            optimizer.state[parameter] = values


def _options(group: dict[str, Any], index: int) -> Any:
    """The options of a group of parameters: lr, betas, whatever a scheduler left there."""
    found = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return encode(found, f"param_groups[{index}]")


def _converters(model: nn.Module) -> dict[int, tuple[Convert, Convert]]:
    """How to put the experts in front and back, by the id of each packed factor."""
    stack = stackers(model)
    return {
        id(factor.parameter): (
            stack[id(factor.parameter)],
            pack_b if factor.is_b else pack_a,
        )
        for _, factor in parameter_factors(model)
        if id(factor.parameter) in stack and not is_stacked(factor.parameter)
    }


def _check_like(where: str, value: Tensor, parameter: Tensor) -> None:
    sharded = isinstance(parameter, DTensor)
    if value.shape != parameter.shape or isinstance(value, DTensor) != sharded:
        kind = f"{'sharded' if sharded else 'whole'} parameter {tuple(parameter.shape)}"
        raise ValueError(
            f"{where} is a {type(value).__name__} {tuple(value.shape)} of a {kind}; only state of "
            f"the parameter's own shape and sharding, and single numbers, fit another layout"
        )
