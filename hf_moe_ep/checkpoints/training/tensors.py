"""Model and optimizer as named tensors that no layout shows in, and back.

    model.<parameter>             parameters (a tied one once, by its first name), buffers
    optimizer.<key>.<parameter>   what the optimizer keeps in the parameter's shape: exp_avg, ...
    everything else               JSON (`state_file.py`): single numbers like `step`, options

Sharded tensors are DTensors of global shape, so they can be cut for any other layout (`spread.py`,
`part_files.py`). LoRA factors of experts are kept as a sharded model has them, [E, r, in] and
[E, out, r], and packed on the way into a model that is not sharded (`factors.py`).

Not by torch's get_optimizer_state_dict: without a state it makes one by a step with lr 0, which
leaves `step` at 1, so a run saved before its first step would go on with other bias corrections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage.boxes import local_box, local_tensor
from hf_moe_ep.checkpoints.storage.part_files import Part
from hf_moe_ep.checkpoints.storage.safetensors_file import check_dtype
from hf_moe_ep.checkpoints.storage.spread import choose_replicas, find_spreads
from hf_moe_ep.checkpoints.training.state_file import Group, Kept, OptimizerState, TensorForm
from hf_moe_ep.lora.computed import stacked_factors
from hf_moe_ep.lora.factors import is_stacked
from hf_moe_ep.ranks.together import this_rank, world_size
from hf_moe_ep.state import quantised_matrices
from hf_moe_ep.upstream.adapters import adapter_parameters, wraps_for_adapters
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
        """Bring `value`, of the shape of `tensor`, to the form of a file."""
        return (value if self.to_file is None else self.to_file(value)).contiguous()

    def file_shape(self) -> list[int]:
        """Return the shape of the form that a file has."""
        if self.to_file is None:
            return list(self.tensor.shape)
        return list(self.to_file(self.tensor.to("meta")).shape)

    def fit(self, value: Tensor) -> Tensor:
        """Bring `value`, as a file has it, to the shape of `tensor`."""
        return value if self.from_file is None else self.from_file(value)


@dataclass
class NamedState:
    """The tensors of a training state by name, and what else there is of model and optimizer."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Tensor]
    optimizer: OptimizerState | None

    def forms(self) -> dict[str, TensorForm]:
        """Global shape and dtype of every tensor, and who writes it; the same on every rank.

        Raises:
            ValueError: a tensor lies in a way, or is of a dtype, that files do not hold.
        """
        for name, tensor in self.tensors.items():
            check_dtype(name, tensor.dtype)
        spreads = find_spreads(self.tensors, world_size())
        replicas = choose_replicas(
            {name: (spreads[name], _bytes(tensor)) for name, tensor in self.tensors.items()}
        )
        return {
            name: TensorForm(list(tensor.shape), tensor.dtype, spreads[name], replicas[name])
            for name, tensor in self.tensors.items()
        }

    def parts(self, forms: dict[str, TensorForm], limit: int) -> tuple[list[Part], int]:
        """List what this rank writes, and the number of files; one ends after `limit` bytes."""
        found: list[Part] = []
        number, so_far, rank = 1, 0, this_rank()
        for name, tensor in self.tensors.items():
            number = 1 + so_far // (limit * world_size())
            so_far += _bytes(tensor)
            form, values = forms[name], local_tensor(tensor).detach()
            assert form.spread is not None
            if values.numel() and form.spread.is_writer(rank, form.replica):
                found.append(Part(name, local_box(tensor), values, number))
        return found, number


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """Name what is saved of a model: all of it, or all but the base that PEFT froze.

    Without experts that are held quantised: `base.py` knows them by hashes.
    """
    inner = unwrap(model)
    adapted = any(wraps_for_adapters(module) for module in inner.modules())
    of_adapters = adapter_parameters(inner)
    convert = _converters(inner)
    left_out = {
        id(tensor)
        for name, held, _ in quantised_matrices(inner)
        for tensor in held.by_name(name).values()
    }
    found = {
        canonical_name(name): Slot(p.detach(), *convert.get(p, ()))
        for name, p in inner.named_parameters()
        if id(p) not in left_out and (p.requires_grad or id(p) in of_adapters or not adapted)
    }
    return found | {canonical_name(name): Slot(b.detach()) for name, b in persistent_buffers(inner)}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def collect(model: nn.Module, optimizer: Any) -> NamedState:
    """Gather all state of a resharded model and its optimizer; tensors may be the model's own.

    Raises:
        ValueError: the optimizer keeps something that this cannot name or hold.
    """
    slots = model_slots(model)
    tensors = {
        f"model.{name}": slot.saved(slot.tensor) for name, slot in slots.items() if slot.tensor.ndim
    }
    scalars = {name: slot.tensor for name, slot in slots.items() if not slot.tensor.ndim}
    if optimizer is None:
        return NamedState(tensors, scalars, None)
    moments, state = _collect_optimizer(model, optimizer)
    return NamedState(tensors | moments, scalars, state)


def _collect_optimizer(
    model: nn.Module, optimizer: Any
) -> tuple[dict[str, Tensor], OptimizerState]:
    names, slots = parameter_names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    kept: dict[str, dict[str, Kept]] = {}
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
            if isinstance(value, Tensor) and value.ndim:
                where = f"{key} of {name} in {type(optimizer).__name__}"
                _check_like(where, value, parameter)
                in_file = f"optimizer.{key}.{name}"
                tensors[in_file] = slots[name].saved(value.detach())
                kept[name][key] = Kept(in_file=in_file)
            elif isinstance(value, Tensor):
                beside = value.device.type != "cpu"
                kept[name][key] = Kept(value=value.detach(), beside_parameter=beside)
            else:
                kept[name][key] = Kept(value=value)
    groups = [
        Group([names[id(parameter)] for parameter in group["params"]], _options(group))
        for group in optimizer.param_groups
    ]
    return tensors, OptimizerState(kind_of(optimizer), bases_of(optimizer), kept, groups)


def kind_of(optimizer: Any) -> str:
    """Name the class of an optimizer, behind Accelerate's wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def bases_of(optimizer: Any) -> list[str]:
    """Name the classes that an optimizer's derives from, up to the first of torch's own.

    No further: torch's AdamW derives from its Adam, and is another optimizer all the same.
    """
    found: list[str] = []
    for kind in type(getattr(optimizer, "optimizer", optimizer)).__mro__:
        if kind in (torch.optim.Optimizer, object):
            break
        found.append(kind.__name__)
        if kind.__module__.startswith("torch.optim."):
            break
    return found[1:]


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
            slots[names[id(p)]] = Slot(p.detach(), *convert.get(p, ()))
    return names, slots


def new_moment(slot: Slot, dtype: torch.dtype, parameter_dtype: torch.dtype | None) -> Tensor:
    """Make room for optimizer state of a parameter, laid out as the file's form of it.

    In the parameter's dtype where it was so when saved, else in the one that it was saved in.
    """
    own = dtype == parameter_dtype
    return torch.zeros_like(slot.saved(slot.tensor), dtype=slot.tensor.dtype if own else dtype)


def put_optimizer(
    model: nn.Module, optimizer: Any, saved: OptimizerState, tensors: dict[str, Tensor]
) -> None:
    """Replace the optimizer's state and options by what was read."""
    names, slots = parameter_names(model, optimizer)
    for group, of_file in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in of_file.options.items():
            now = group.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                now.copy_(value)
            else:
                group[key] = value
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in saved.kept:
                optimizer.state[parameter] = {
                    key: _put(kept, slots[name], parameter, tensors)
                    for key, kept in saved.kept[name].items()
                }


def _put(kept: Kept, slot: Slot, parameter: Tensor, tensors: dict[str, Tensor]) -> Any:
    """Return what the optimizer is to keep of `parameter`."""
    if kept.in_file is not None:
        return slot.fit(tensors[kept.in_file])
    return kept.value.to(parameter.device) if kept.beside_parameter else kept.value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group of parameters: lr, betas, whatever a scheduler left there."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _converters(model: nn.Module) -> dict[nn.Parameter, tuple[Convert, Convert]]:
    """Find how to put the experts of each packed factor in front, and back."""
    return {
        factor.parameter: (factor.stack, factor.pack)
        for factor in stacked_factors(model)
        if not is_stacked(factor.parameter)
    }


def _check_like(where: str, value: Tensor, parameter: Tensor) -> None:
    sharded = isinstance(parameter, DTensor)
    if value.shape != parameter.shape or isinstance(value, DTensor) != sharded:
        kind = f"{'sharded' if sharded else 'whole'} parameter {tuple(parameter.shape)}"
        raise ValueError(
            f"{where} is a {type(value).__name__} {tuple(value.shape)} of a {kind}; only state of "
            f"the parameter's own shape and sharding, and single numbers, fit another layout"
        )
