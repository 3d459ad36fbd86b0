"""The state of a training run as named tensors that do not depend on the layout.

    model.<parameter>             parameters (a tied one once, by its first name), buffers
    optimizer.<key>.<parameter>   optimizer state of the parameter's shape: exp_avg, ...
    everything else               JSON (`state_file.py`): single numbers like `step`, options

Sharded tensors are DTensors of the global shape, so they can be sharded for any other layout
(`spread.py`, `part_files.py`). LoRA factors of experts are saved in the form of a sharded model,
[E, r, in] and [E, out, r]; loading packs them for a model that is not sharded (`factors.py`).

torch's get_optimizer_state_dict is not used: if an optimizer has no state yet it makes one by a
step with lr 0, which leaves `step` at 1. A run saved before its first step would go on with another
bias correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage.boxes import Box, local_box, local_tensor
from hf_moe_ep.checkpoints.storage.part_files import Shards
from hf_moe_ep.checkpoints.storage.safetensors_file import check_dtype
from hf_moe_ep.checkpoints.storage.spread import choose_writers
from hf_moe_ep.checkpoints.training.state_file import (
    Group,
    OptimizerState,
    OptimizerValue,
    TensorForm,
)
from hf_moe_ep.lora.computed import stacked_factors
from hf_moe_ep.lora.factors import is_stacked
from hf_moe_ep.ranks.together import this_rank, world_size
from hf_moe_ep.state import quantised_matrices
from hf_moe_ep.upstream.adapters import adapter_parameters, wraps_for_adapters
from hf_moe_ep.upstream.models import persistent_buffers
from hf_moe_ep.upstream.module_names import canonical_name, unwrap

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the model and the conversion between its form and the form in the files.

    Only packed LoRA factors have a conversion: (E * r, in) in the model is [E, r, in] in a file.
    """

    tensor: Tensor
    to_file: Convert | None = None
    from_file: Convert | None = None

    def in_file_form(self, value: Tensor) -> Tensor:
        """Convert `value`, which has the shape of `tensor`, to the form of the files."""
        return (value if self.to_file is None else self.to_file(value)).contiguous()

    def file_shape(self) -> list[int]:
        """Return the shape in the files."""
        if self.to_file is None:
            return list(self.tensor.shape)
        return list(self.to_file(self.tensor.to("meta")).shape)

    def in_model_form(self, value: Tensor) -> Tensor:
        """Convert a value that was read to the shape of `tensor`."""
        return value if self.from_file is None else self.from_file(value)


@dataclass
class NamedState:
    """The tensors of a training state by name, and the other state of model and optimizer."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Tensor]
    optimizer: OptimizerState | None

    def forms(self) -> dict[str, TensorForm]:
        """Return global shape, dtype and writer of every tensor; the same on every rank.

        Raises:
            ValueError: a tensor has a sharding or a dtype that the files cannot hold.
        """
        for name, tensor in self.tensors.items():
            check_dtype(name, tensor.dtype)
        writers = choose_writers(self.tensors, world_size())
        return {
            name: TensorForm(list(tensor.shape), tensor.dtype, *writers[name])
            for name, tensor in self.tensors.items()
        }

    def files(self, forms: dict[str, TensorForm], limit: int) -> list[Shards]:
        """Return the shards that this rank writes, by file; a file has about `limit` bytes.

        Every rank has the same number of files; some may be empty.
        """
        files: list[dict[str, tuple[Box, Tensor]]] = [{}]
        so_far, rank = 0, this_rank()
        for name, tensor in self.tensors.items():
            while so_far // (limit * world_size()) >= len(files):
                files.append({})
            so_far += tensor.numel() * tensor.element_size()
            form, values = forms[name], local_tensor(tensor).detach()
            assert form.spread is not None
            if values.numel() and form.spread.is_writer(rank, form.replica):
                files[-1][name] = (local_box(tensor), values)
        return list(files)


def model_slots(model: nn.Module) -> dict[str, StateTensor]:
    """Return the tensors of a model that are saved, by name.

    Left out are the base model that PEFT froze, and experts that are held quantised: `base.py`
    saves their hashes.
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
        canonical_name(name): StateTensor(p.detach(), *convert.get(p, ()))
        for name, p in inner.named_parameters()
        if id(p) not in left_out and (p.requires_grad or id(p) in of_adapters or not adapted)
    }
    buffers = persistent_buffers(inner)
    return found | {canonical_name(name): StateTensor(b.detach()) for name, b in buffers}


def collect(model: nn.Module, optimizer: Any) -> NamedState:
    """Collect the state of a resharded model and its optimizer; tensors may share their memory.

    Raises:
        ValueError: the optimizer has state that cannot be named or saved.
    """
    of_model = model_slots(model)
    tensors = {
        f"model.{name}": one.in_file_form(one.tensor)
        for name, one in of_model.items()
        if one.tensor.ndim
    }
    scalars = {name: one.tensor for name, one in of_model.items() if not one.tensor.ndim}
    if optimizer is None:
        return NamedState(tensors, scalars, None)
    moments, state = _collect_optimizer(model, optimizer)
    return NamedState(tensors | moments, scalars, state)


def _collect_optimizer(
    model: nn.Module, optimizer: Any
) -> tuple[dict[str, Tensor], OptimizerState]:
    names, trained = parameter_names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, OptimizerValue]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"the optimizer has state under the key {parameter!r}, which is no parameter"
            )
        name = names.get(id(parameter), f"a parameter {tuple(parameter.shape)}")
        if name not in trained:
            raise ValueError(
                f"the optimizer keeps state of {name}, which is in none of its groups; put it back "
                f"into one, or del optimizer.state[parameter]"
            )
        values[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                where = f"{key} of {name} in {type(optimizer).__name__}"
                _check_like(where, value, parameter)
                in_file = f"optimizer.{key}.{name}"
                tensors[in_file] = trained[name].in_file_form(value.detach())
                values[name][key] = OptimizerValue(in_file=in_file)
            elif isinstance(value, Tensor):
                on_device = value.device.type != "cpu"
                values[name][key] = OptimizerValue(value=value.detach(), on_device=on_device)
            else:
                values[name][key] = OptimizerValue(value=value)
    groups = [
        Group([names[id(parameter)] for parameter in group["params"]], _options(group))
        for group in optimizer.param_groups
    ]
    return tensors, OptimizerState(kind_of(optimizer), bases_of(optimizer), values, groups)


def kind_of(optimizer: Any) -> str:
    """Return the class name of an optimizer, which Accelerate may have wrapped."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def bases_of(optimizer: Any) -> list[str]:
    """Return the names of an optimizer's base classes, up to the first class of torch.

    The bases of torch's own classes are left out: torch's AdamW derives from Adam, but the state of
    one does not fit the other.
    """
    found: list[str] = []
    for kind in type(getattr(optimizer, "optimizer", optimizer)).__mro__:
        if kind in (torch.optim.Optimizer, object):
            break
        found.append(kind.__name__)
        if kind.__module__.startswith("torch.optim."):
            break
    return found[1:]


def parameter_names(
    model: nn.Module, optimizer: Any
) -> tuple[dict[int, str], dict[str, StateTensor]]:
    """Return the names of the model's parameters by id, and the optimizer's parameters by name.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    inner = unwrap(model)
    convert = _converters(inner)
    names = {id(p): canonical_name(name) for name, p in inner.named_parameters()}
    trained = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"parameter {number} of the optimizer's group {index}, {tuple(p.shape)}, is "
                    f"none of this model's; make the optimizer after apply_ep_fsdp2(model), or "
                    f"give both to accelerator.prepare"
                )
            trained[names[id(p)]] = StateTensor(p.detach(), *convert.get(p, ()))
    return names, trained


def new_moment(
    parameter: StateTensor, dtype: torch.dtype, parameter_dtype: torch.dtype | None
) -> Tensor:
    """Allocate optimizer state of a parameter in the form of the files.

    If the saved state had the dtype of the saved parameter, the new state has the dtype of the
    parameter now; otherwise it has the saved dtype.
    """
    tensor = parameter.tensor
    new_dtype = tensor.dtype if dtype == parameter_dtype else dtype
    return torch.zeros_like(parameter.in_file_form(tensor), dtype=new_dtype)


def put_optimizer(
    model: nn.Module, optimizer: Any, saved: OptimizerState, tensors: dict[str, Tensor]
) -> None:
    """Replace the optimizer's state and options by the saved ones."""
    names, trained = parameter_names(model, optimizer)
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
            if name in saved.values:
                optimizer.state[parameter] = {
                    key: _restore(value, trained[name], parameter, tensors)
                    for key, value in saved.values[name].items()
                }


def _restore(
    saved: OptimizerValue, trained: StateTensor, parameter: Tensor, tensors: dict[str, Tensor]
) -> Any:
    """Return one entry of the optimizer's state of a parameter."""
    if saved.in_file is not None:
        return trained.in_model_form(tensors[saved.in_file])
    return saved.value.to(parameter.device) if saved.on_device else saved.value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group: lr, betas, and what a scheduler stores there."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _converters(model: nn.Module) -> dict[nn.Parameter, tuple[Convert, Convert]]:
    """Return the conversions of packed LoRA factors: experts in the first dim, and back."""
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
            f"{where} is a {type(value).__name__} {tuple(value.shape)} of a {kind}; a checkpoint "
            f"can hold state of the parameter's own shape and sharding, and single numbers"
        )
