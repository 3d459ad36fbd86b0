"""Set the initial value of each parameter of a model, before `fully_shard` shards the parameter.

All ranks start with the values of rank 0, because each rank initialises a new head or adapter from
its own seed, and because only rank 0 has weights after memory-efficient loading. With pipeline
stages, the first rank of a stage has received the values of rank 0 before (`stages.py`).
`find_entries` lists the parameters, and `materialize` runs these steps for one parameter:

    1 broadcast      send the whole value from the first rank of the stage to the device of this
                     rank; a parameter that is read from a checkpoint later stays on meta
    2 stack          make experts dim 0 of an adapter's factor, which PEFT stores as one 2-D matrix
    3 split          keep the experts of this rank (ep), and this rank's part of each (`etp.py`)
    4 convert        convert master weights to fp32, and quantised experts to bytes and scales
    5 register       register the result under every name that the parameter had, as a DTensor on ep
                     and etp if it was split; scales get the same name with a suffix

With 4 experts and ep 2, PEFT stores a factor lora_B (out 5, r 3) as (5, 12). Step 2 makes it
[4, 5, 3], step 3 keeps [2, 5, 3] on rank 1 (experts 2 and 3), and step 5 registers a DTensor of
global shape [4, 5, 3].

Two kinds of parameters have no entry: parameters that FSDP2 ignores (`broadcast_unsharded`), and
parameters of a class whose state a copy would lose (bitsandbytes' Params4bit).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.etp import Cut, find_cut_of_tensor, find_cuts
from hf_moe_ep.lora.computed import Conversion, iterate_stacked_factors, stack_conversion
from hf_moe_ep.ops.quantised import Quantisation, quantise_stack
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.boxes import from_even_shards
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.sharding.replaced_parameters import mark_as_replaced
from hf_moe_ep.state import Compute, iterate_experts_modules
from hf_moe_ep.upstream.models import is_correction_bias
from hf_moe_ep.upstream.modules import get_own_buffers


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter of a model that is not sharded yet.

    Attributes:
        parameter: the parameter.
        owners: (module, name of the parameter in this module); a tied parameter has several owners.
        stack: for an adapter's factor, the function that makes experts its dim 0; else None.
        over_ep: True if dim 0 counts experts, which are split over ep.
        compute: the `Compute` of the experts module if the parameter is to be quantised, else None.
        cut: how the parameter is cut over an etp group; None if it belongs to no expert.
    """

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    stack: Conversion | None
    over_ep: bool
    compute: Compute | None = None
    cut: Cut | None = None

    @property
    def held_cut(self) -> Cut | None:
        """The cut of the stored tensor. A quantised tensor is stored as [E, out, in]."""
        if self.compute is None:
            return self.cut
        return find_cut_of_tensor(self.compute, self.owners[0][1], quantised=True)

    @property
    def quantisation(self) -> Quantisation | None:
        """The quantisation of the matrices, or None if they keep their dtype."""
        return None if self.compute is None else self.compute.quantisation

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape (out, in) of an expert's matrix, also if the module stores it transposed."""
        _, rows, columns = self.parameter.shape
        transposed = self.compute is not None and self.compute.transposed
        return (columns, rows) if transposed else (rows, columns)


ParameterEntries = dict[nn.Parameter, ParameterEntry]


def find_entries(
    model: nn.Module, experts: Iterable[nn.Module], plan: ModelPlan, options: ShardOptions
) -> ParameterEntries:
    """Create an entry for each parameter to materialize. `experts` are the experts modules."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    factors = {
        factor.parameter: stack_conversion(factor) for factor in iterate_stacked_factors(model)
    }
    stacked = {
        parameter
        for module in experts
        for name, parameter in module.named_parameters()
        if parameter in factors or name.rpartition(".")[2] in plan.expert_weights
    }
    quantised = _find_quantised(experts)
    cuts = find_cuts(model)
    return {
        parameter: ParameterEntry(
            parameter,
            parameter_owners,
            factors.get(parameter),
            parameter in stacked,
            quantised.get(parameter),
            cuts.get(parameter),
        )
        for parameter, parameter_owners in owners.items()
        if type(parameter) is nn.Parameter and parameter not in options.ignored_params
    }


def _find_quantised(experts: Iterable[nn.Module]) -> dict[nn.Parameter, Compute]:
    """Map each stacked matrix that is to be quantised to the `Compute` of its module."""
    compute_of: dict[nn.Parameter, Compute] = {}
    for wrapped in experts:
        for _, module, layer in iterate_experts_modules(wrapped):
            compute = layer.compute
            if compute is not None and compute.quantisation is not None:
                compute_of |= {getattr(module, name): compute for name in compute.parameters}
    return compute_of


# Values that rank 0 has sent for the parameters of this rank's stage; empty without stages.
ReceivedValues = dict[nn.Parameter, Tensor]


def materialize(
    entry: ParameterEntry, meshes: Meshes, options: ShardOptions, received: ReceivedValues
) -> list[nn.Parameter]:
    """Run the steps of the module docstring for one parameter, and return its replacements.

    The bytes and the scales replace a quantised parameter. A single parameter replaces any other
    parameter.
    """
    value = _receive_initial_value(entry.parameter, meshes, options, received)
    if entry.stack is not None:
        value = entry.stack(value)
    is_split = entry.over_ep and meshes.expert_axes.size() > 1
    if entry.over_ep and meshes.ep_size > 1:
        # A slice would keep the memory of all experts allocated.
        value = value.chunk(meshes.ep_size)[meshes.ep_rank].clone()
    held_cut = Cut(None)
    if entry.over_ep and meshes.etp_size > 1:
        assert entry.cut is not None and entry.held_cut is not None
        held_cut = entry.held_cut
        value = entry.cut.take(value, meshes.etp_rank, meshes.etp_size)
    parameter = entry.parameter
    if options.fp32_masters and parameter.requires_grad and parameter.is_floating_point():
        value = value.to(torch.float32)
    new_parameters = []
    for suffix, tensor in _quantise(value, entry).items():
        tensor = held_cut.hold(tensor).contiguous()
        if is_split:
            placements = held_cut.placements(meshes)
            tensor = from_even_shards(tensor, meshes.expert_axes, placements)
        new_parameters.append(_register(tensor, entry, suffix))
    return new_parameters


def _quantise(value: Tensor, entry: ParameterEntry) -> dict[str, Tensor]:
    """Quantise a value if its entry says so, and return the tensors by the suffixes of their names.

    Without quantisation the only suffix is "".
    """
    if entry.compute is None or entry.quantisation is None:
        return {"": value}
    value_LOI = value.transpose(1, 2) if entry.compute.transposed else value
    return quantise_stack(value_LOI, entry.quantisation).by_name("")


def _receive_initial_value(
    parameter: nn.Parameter, meshes: Meshes, options: ShardOptions, received: ReceivedValues
) -> Tensor:
    """Return the value of rank 0; a parameter that is read from a checkpoint stays on meta."""
    if parameter in options.empty_params:
        return parameter.detach()
    return broadcast_from_first(received.pop(parameter, parameter.detach()), meshes)


def broadcast_from_first(tensor: Tensor, meshes: Meshes) -> Tensor:
    """Return the first rank's `tensor` on every rank of the stage.

    On the first rank the result may be `tensor` itself.
    """
    if dist.get_rank() == meshes.first_rank:
        value = tensor.to(meshes.device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=meshes.device)
    dist.broadcast(value, src=meshes.first_rank, group=meshes.stage_group)
    return value


def _register(value: Tensor, entry: ParameterEntry, suffix: str) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=entry.parameter.requires_grad)
    for module, name in entry.owners:
        setattr(module, name + suffix, parameter)
    mark_as_replaced(entry.parameter)
    return parameter


def broadcast_correction_biases(
    model: nn.Module, meshes: Meshes, options: ShardOptions, received: ReceivedValues
) -> frozenset[nn.Parameter]:
    """Broadcast the correction biases that are parameters, and return the new parameters.

    Every rank keeps the whole bias in the dtype in which it was loaded, like a bias that is a
    buffer. Rounding to bf16 would change the routers' choice of experts. The new parameters are
    frozen even if the script has set `requires_grad` on all parameters, because no bias gets a
    gradient.
    """
    new_biases: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not is_correction_bias(name):
                continue
            if parameter not in new_biases:
                value = _receive_initial_value(parameter, meshes, options, received)
                new_biases[parameter] = nn.Parameter(value, requires_grad=False)
            setattr(module, name, new_biases[parameter])
    return frozenset(new_biases.values())


def broadcast_unsharded(model: nn.Module, meshes: Meshes, options: ShardOptions) -> None:
    """Broadcast buffers, and the parameters that FSDP2 ignores, from the stage's first rank."""
    for parameter in model.parameters():
        # The tensor is changed in place, because FSDP2 identifies ignored parameters by `id`.
        if parameter in options.ignored_params and type(parameter) is nn.Parameter:
            parameter.data = broadcast_from_first(parameter.detach(), meshes)
    for module in model.modules():
        for name, buffer in get_own_buffers(module).items():
            if buffer is not None:
                get_own_buffers(module)[name] = broadcast_from_first(buffer.detach(), meshes)
