"""Collect the state of a training run as named tensors, for any number of ranks and mesh sizes.

    name                          tensor
    model.<parameter>             a parameter (tied parameters have their first name) or a buffer
    optimizer.<key>.<parameter>   optimizer state of the parameter's shape: exp_avg, ...

Everything else is saved as JSON (`state_file.py`): single numbers like `step`, and options. Sharded
tensors are DTensors of the global shape, so another run can shard them over its own ranks
(`spread.py`, `part_files.py`). LoRA factors of experts are saved in the form of a sharded model,
[E, r, in] and [E, out, r]; loading packs them for a model that is not sharded (`lora/factors.py`).

torch's get_optimizer_state_dict is not used. If an optimizer has no state yet, that function
creates the state by a step with lr 0, which leaves `step` at 1. A run that was saved before its
first step would then resume with another bias correction.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.checkpoints.storage.part_files import Shards
from hf_moe_ep.checkpoints.storage.safetensors_file import check_dtype
from hf_moe_ep.checkpoints.storage.spread import choose_writers
from hf_moe_ep.checkpoints.training.state_file import (
    Group,
    OptimizerState,
    OptimizerValue,
    SavedTensor,
)
from hf_moe_ep.etp import get_stock_shape, list_stock_parts, map_ids_to_split_dims
from hf_moe_ep.lora.computed import iterate_stacked_factors, pack_conversion, stack_conversion
from hf_moe_ep.lora.factors import is_stacked
from hf_moe_ep.ranks.all_ranks import this_rank, world_size
from hf_moe_ep.ranks.boxes import Box
from hf_moe_ep.state import find_state, iterate_quantised_matrices
from hf_moe_ep.upstream.adapters import list_adapter_parameter_ids, wraps_for_adapters
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap

_WHY_NOT_TORCH_MUON = (
    "it leaves stacked experts to another optimizer, and gathers sharded matrices on every rank; "
    "use hf_moe_ep.Muon(model, lr=...), which trains all matrices, also those of the experts"
)

Convert = Callable[[Tensor], Tensor]
# The conversions of a tensor that has the same form in the files and in the model.
_NO_CONVERSIONS: tuple[Convert | None, Convert | None] = (None, None)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the model, and the conversions between its form and the form in the files.

    Attributes:
        to_file, from_file: the conversions of a packed LoRA factor, whose form is (E * r, in) in
            the model and [E, r, in] in a file; None for all other tensors.
        split_dim: the dim in the file that the model splits into two dims (`etp.py`). The split
            needs no conversion, because a rank writes its shard as two boxes.
    """

    tensor: Tensor
    to_file: Convert | None = None
    from_file: Convert | None = None
    split_dim: int | None = None

    def to_file_form(self, value: Tensor) -> Tensor:
        """Convert `value`, which has the shape of `tensor`, to the form of the files."""
        return (value if self.to_file is None else self.to_file(value)).contiguous()

    def file_shape(self) -> list[int]:
        """Return the shape in the files."""
        if self.to_file is None:
            return list(get_stock_shape(self.tensor.shape, self.split_dim))
        return list(self.to_file(self.tensor.to("meta")).shape)

    def to_model_form(self, value: Tensor) -> Tensor:
        """Convert a value that was read from the files to the shape of `tensor`."""
        return value if self.from_file is None else self.from_file(value)


@dataclass
class NamedState:
    """The tensors of a training state by name, and the rest of the state of model and optimizer.

    Attributes:
        scalars: the 0-dim tensors of the model.
        split_dims: `StateTensor.split_dim` of each tensor that has one.
        ranks: the ranks that hold the tensors: all ranks, or the ranks of this pipeline stage.
    """

    tensors: dict[str, Tensor]
    scalars: dict[str, Tensor]
    optimizer: OptimizerState | None
    split_dims: dict[str, int]
    ranks: Sequence[int]

    def describe_tensors(self) -> dict[str, SavedTensor]:
        """Return shape, dtype, sharding and writer of every tensor, the same on all `ranks`.

        Raises:
            ValueError: a tensor has a sharding or a dtype that the files cannot hold.
        """
        for name, tensor in self.tensors.items():
            check_dtype(name, tensor.dtype)
        writers = choose_writers(self.tensors, self.ranks, self.split_dims)
        shapes = {
            n: get_stock_shape(t.shape, self.split_dims.get(n)) for n, t in self.tensors.items()
        }
        return {
            name: SavedTensor(list(shapes[name]), tensor.dtype, *writers[name])
            for name, tensor in self.tensors.items()
        }

    def list_own_files(
        self, saved_tensors: dict[str, SavedTensor], bytes_per_file: int
    ) -> list[Shards]:
        """Return the shards that this rank writes, by file.

        All `ranks` return the same number of files; some files are empty. If a shard has a second
        box, this box is in a file after all others.

        Args:
            saved_tensors: the result of `describe_tensors`.
            bytes_per_file: the approximate size of a file.
        """
        files: list[dict[str, tuple[Box, Tensor]]] = [{}]
        second_boxes: list[dict[str, tuple[Box, Tensor]]] = [{}]
        rank, num_bytes = this_rank(), 0  # the bytes of all `ranks`
        for name, tensor in self.tensors.items():
            while num_bytes // (bytes_per_file * len(self.ranks)) >= len(files):
                files.append({})
                second_boxes.append({})
            num_bytes += tensor.numel() * tensor.element_size()
            saved = saved_tensors[name]
            assert saved.spread is not None
            if not saved.spread.is_writer(rank, saved.replica):
                continue
            for number, (box, values) in enumerate(
                list_stock_parts(tensor, self.split_dims.get(name))
            ):
                if values.numel():
                    (second_boxes if number else files)[-1][name] = (box, values.detach())
        return [*files, *second_boxes] if self.split_dims else list(files)


def list_state_tensors(model: nn.Module) -> dict[str, StateTensor]:
    """Return the tensors of a model, or of this rank's pipeline stage, that are saved, by name.

    The base model that PEFT froze is left out, and so are experts that are held quantised;
    `base.py` saves hashes of these experts instead.
    """
    inner = unwrap(model)
    state = find_state(inner)
    if state is not None and state.stage is not None:
        has_adapters = state.stage.has_adapters  # the adapted layers may be on other stages
    else:
        has_adapters = any(map(wraps_for_adapters, inner.modules()))
    adapter_ids = list_adapter_parameter_ids(inner)
    converters, split_dims = _find_converters(inner), map_ids_to_split_dims(inner)
    quantised = {
        id(tensor)
        for name, matrix, _ in iterate_quantised_matrices(inner)
        for tensor in matrix.by_name(name).values()
    }
    parameters = {
        _find_name_in_whole_model(inner, name): StateTensor(
            p.detach(), *converters.get(p, _NO_CONVERSIONS), split_dims.get(id(p))
        )
        for name, p in inner.named_parameters()
        if id(p) not in quantised and (p.requires_grad or id(p) in adapter_ids or not has_adapters)
    }
    buffers = iterate_persistent_buffers(inner)
    return parameters | {get_canonical_name(name): StateTensor(b.detach()) for name, b in buffers}


def find_trained_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained, as in `list_state_tensors`."""
    inner = unwrap(model)
    return {
        _find_name_in_whole_model(inner, name)
        for name, p in inner.named_parameters()
        if p.requires_grad
    }


def list_model_targets(
    entries: Mapping[str, StateTensor],
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors to read into, by their names in the files.

    They are the model's own tensors, or new tensors if the files have another form. The second dict
    has `StateTensor.split_dim` of each tensor that has one.
    """
    targets: dict[str, Tensor] = {}
    split_dims: dict[str, int] = {}
    for name, entry in entries.items():
        if entry.split_dim is not None:
            split_dims[f"model.{name}"] = entry.split_dim
        if entry.tensor.ndim:
            is_packed = entry.to_file is not None
            targets[f"model.{name}"] = (
                entry.to_file_form(entry.tensor) if is_packed else entry.tensor
            )
    return targets, split_dims


@torch.no_grad()
def fill_model(
    entries: Mapping[str, StateTensor],
    targets: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor],
) -> None:
    """Fill the 0-dim tensors and the packed factors; all other tensors were read in place.

    Args:
        targets: the result of `list_model_targets`, after reading.
        scalars: the saved 0-dim tensors.
    """
    for name, entry in entries.items():
        if not entry.tensor.ndim:
            entry.tensor.copy_(scalars[name])
        elif entry.from_file is not None:
            entry.tensor.copy_(entry.to_model_form(targets[f"model.{name}"]))


def _find_name_in_whole_model(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the whole model, of which this rank may hold one stage.

    On the last stage, a head that is tied to the embedding gets the embedding's name.
    """
    name, state = get_canonical_name(name), find_state(model)
    return name if state is None or state.stage is None else state.stage.aliases.get(name, name)


def collect(model: nn.Module, optimizer: Any) -> NamedState:
    """Collect the state of a model and its optimizer; the tensors may share their memory.

    The model must be resharded, so that its parameters are shards and not gathered.

    Raises:
        ValueError: the optimizer has state that cannot be named or saved.
    """
    model_tensors = list_state_tensors(model)
    state = find_state(model)
    stage = None if state is None else state.stage
    copies = set() if stage is None else set(stage.aliases.values())
    model_tensors = {name: saved for name, saved in model_tensors.items() if name not in copies}
    ranks = range(world_size())
    if stage is not None:
        ranks_per_stage = world_size() // stage.size
        ranks = range(stage.index * ranks_per_stage, (stage.index + 1) * ranks_per_stage)
    tensors = {
        f"model.{name}": saved.to_file_form(saved.tensor)
        for name, saved in model_tensors.items()
        if saved.tensor.ndim
    }
    scalars = {name: saved.tensor for name, saved in model_tensors.items() if not saved.tensor.ndim}
    split_dims = {
        f"model.{name}": saved.split_dim
        for name, saved in model_tensors.items()
        if saved.split_dim is not None
    }
    if optimizer is None:
        return NamedState(tensors, scalars, None, split_dims, ranks)
    moments, optimizer_state, optimizer_split_dims = _collect_optimizer(model, optimizer, copies)
    return NamedState(
        tensors | moments, scalars, optimizer_state, split_dims | optimizer_split_dims, ranks
    )


def _collect_optimizer(
    model: nn.Module, optimizer: Any, copies: set[str]
) -> tuple[dict[str, Tensor], OptimizerState, dict[str, int]]:
    """Return the optimizer's tensors by name, the rest of its state, and the tensors' split dims.

    `copies` has the names of tied parameters that another pipeline stage saves.
    """
    names, trained = list_parameter_names(model, optimizer)
    if _is_torch_muon(optimizer):  # an error would lose the run
        warnings.warn(
            f"this checkpoint has the state of torch.optim.Muon, and load_checkpoint will refuse "
            f"this optimizer: {_WHY_NOT_TORCH_MUON}",
            stacklevel=2,
        )
    tensors: dict[str, Tensor] = {}
    split_dims: dict[str, int] = {}
    values: dict[str, dict[str, OptimizerValue]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"the optimizer has state under the key {parameter!r}, which is not a parameter"
            )
        name = names.get(id(parameter), f"a parameter {tuple(parameter.shape)}")
        if name not in trained:
            raise ValueError(
                f"the optimizer keeps state of {name}, which is in none of its parameter groups; "
                f"add it to a group again, or del optimizer.state[parameter]"
            )
        if name in copies:
            continue  # another pipeline stage saves this state
        values[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                where = f"{key} of {name} in {type(optimizer).__name__}"
                _check_same_shape(where, value, parameter)
                tensor_name = f"optimizer.{key}.{name}"
                tensors[tensor_name] = trained[name].to_file_form(value.detach())
                if (dim := trained[name].split_dim) is not None:
                    split_dims[tensor_name] = dim
                values[name][key] = OptimizerValue(tensor_name=tensor_name)
            elif isinstance(value, Tensor):
                on_device = value.device.type != "cpu"
                values[name][key] = OptimizerValue(value=value.detach(), on_device=on_device)
            else:
                values[name][key] = OptimizerValue(value=value)
    groups = [
        Group([names[id(parameter)] for parameter in group["params"]], _select_options(group))
        for group in optimizer.param_groups
    ]
    state = OptimizerState(get_class_name(optimizer), list_base_names(optimizer), values, groups)
    return tensors, state, split_dims


def refuse_torch_muon(optimizer: Any) -> None:
    """Raise ValueError if `optimizer`, which trains a patched model, is torch.optim.Muon."""
    if _is_torch_muon(optimizer):
        raise ValueError(f"torch.optim.Muon is refused for a patched model: {_WHY_NOT_TORCH_MUON}")


def _is_torch_muon(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.Muon)


def get_class_name(optimizer: Any) -> str:
    """Return the class name of an optimizer, which Accelerate may have wrapped."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def list_base_names(optimizer: Any) -> list[str]:
    """Return the names of an optimizer's base classes, up to the first class of torch.

    The bases of torch's own classes are left out: torch's AdamW derives from Adam, but the state of
    one does not fit the other.
    """
    names: list[str] = []
    for kind in type(getattr(optimizer, "optimizer", optimizer)).__mro__:
        if kind in (torch.optim.Optimizer, object):
            break
        names.append(kind.__name__)
        if kind.__module__.startswith("torch.optim."):
            break
    return names[1:]  # without the optimizer's own class


def list_parameter_names(
    model: nn.Module, optimizer: Any
) -> tuple[dict[int, str], dict[str, StateTensor]]:
    """Return the names of the model's parameters by id, and the optimizer's parameters by name.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    inner = unwrap(model)
    converters, split_dims = _find_converters(inner), map_ids_to_split_dims(inner)
    names = {id(p): _find_name_in_whole_model(inner, name) for name, p in inner.named_parameters()}
    trained = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"parameter {number} of the optimizer's group {index}, {tuple(p.shape)}, does "
                    f"not belong to this model; create the optimizer after apply_ep_fsdp2(model), "
                    f"or pass both to accelerator.prepare"
                )
            converter = converters.get(p, _NO_CONVERSIONS)
            trained[names[id(p)]] = StateTensor(p.detach(), *converter, split_dims.get(id(p)))
    return names, trained


def allocate_moment(
    parameter: StateTensor, dtype: torch.dtype, parameter_dtype: torch.dtype | None
) -> Tensor:
    """Allocate one tensor of a parameter's optimizer state, in the form of the files.

    If the saved state has the dtype of the saved parameter, the new state has the dtype of the
    current parameter; otherwise it has the saved dtype.

    Args:
        dtype: the dtype of the saved state.
        parameter_dtype: the dtype of the saved parameter; None if it was not saved.
    """
    tensor = parameter.tensor
    new_dtype = tensor.dtype if dtype == parameter_dtype else dtype
    return torch.zeros_like(parameter.to_file_form(tensor), dtype=new_dtype)


def restore_optimizer(
    model: nn.Module, optimizer: Any, saved: OptimizerState, tensors: dict[str, Tensor]
) -> None:
    """Replace the optimizer's state and options by the saved ones."""
    names, trained = list_parameter_names(model, optimizer)
    for group, saved_group in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in saved_group.options.items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                current.copy_(value)
            else:
                group[key] = value
    optimizer.state.clear()
    for group in optimizer.param_groups:
        # As in torch's `load_state_dict`: these optimizers need `step` on the device, and the
        # saved run may have had it on the host.
        moves_step = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in saved.values:
                optimizer.state[parameter] = {
                    key: _restore_value(
                        value, trained[name], parameter, tensors, moves_step and key == "step"
                    )
                    for key, value in saved.values[name].items()
                }


def _restore_value(
    saved: OptimizerValue,
    trained: StateTensor,
    parameter: Tensor,
    tensors: dict[str, Tensor],
    to_device: bool,
) -> Any:
    """Return one entry of a parameter's optimizer state.

    Args:
        to_device: move a 0-dim tensor to the parameter's device.
    """
    if saved.tensor_name is not None:
        return trained.to_model_form(tensors[saved.tensor_name])
    if saved.on_device or (to_device and isinstance(saved.value, Tensor)):
        return saved.value.to(parameter.device)
    return saved.value


def _select_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as lr, betas, and a scheduler's options."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _find_converters(
    model: nn.Module,
) -> dict[nn.Parameter, tuple[Convert | None, Convert | None]]:
    """Return (to_file, from_file) of `StateTensor` for each packed LoRA factor of experts."""
    return {
        factor.parameter: (stack_conversion(factor), pack_conversion(factor))
        for factor in iterate_stacked_factors(model)
        if not is_stacked(factor.parameter)
    }


def _check_same_shape(where: str, value: Tensor, parameter: Tensor) -> None:
    sharded = isinstance(parameter, DTensor)
    if value.shape != parameter.shape or isinstance(value, DTensor) != sharded:
        kind = f"{'sharded' if sharded else 'whole'} parameter {tuple(parameter.shape)}"
        raise ValueError(
            f"{where} is a {type(value).__name__} {tuple(value.shape)} for a {kind}; a checkpoint "
            f"can hold optimizer state of the parameter's shape and sharding, and single numbers"
        )
