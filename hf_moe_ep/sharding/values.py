"""Where each parameter of a model is, and how it comes to lie as one of a sharded model does.

A model starts with rank 0's values: each rank builds a random head or adapter from its own seed,
and with memory-efficient loading only rank 0 has weights at all. For each parameter, one at a time:

    1 from rank 0      broadcast whole, onto this rank's device; one that is read from a checkpoint
                       later stays on meta
    2 in front         an adapter's factor is packed by PEFT; its experts come in front of it
    3 own experts      this rank's share where experts are split over ep
    4 dtype            fp32 where masters are wanted; bytes and scales where experts are quantised
    5 register         as a DTensor on ep if it was split, under every name that it had; scales
                       beside it, under its name and what they are

4 experts, ep 2, a factor lora_B (out 5, r 3) packed as (5, 12): 2 makes it [4, 5, 3], 3 leaves rank
1 with experts 2 and 3, [2, 5, 3], and what is registered is a DTensor of global shape [4, 5, 3].

`fully_shard` splits further what is here. Parameters that it is to ignore, and those that carry
state of their own which no copy keeps (bitsandbytes' Params4bit), have no place here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hf_moe_ep.lora.computed import Stack, stacked_factors
from hf_moe_ep.ops.quantised import Quantisation, quantise_stack
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.sharding.options import ShardOptions
from hf_moe_ep.state import STATE, Compute, MoELayer
from hf_moe_ep.upstream.models import is_correction_bias
from hf_moe_ep.upstream.modules import own_buffers


@dataclass(frozen=True)
class Place:
    """One parameter of a model that is not sharded yet.

    Attributes:
        parameter: itself.
        owners: the modules it is registered in, and its names there; several where it is tied.
        stack: puts experts in front of an adapter's factor; None for all that is no factor.
        over_ep: whether its first dim is experts, of which each ep rank gets a share.
        compute: of the experts module, for a stacked matrix that is to be quantised; else None.
    """

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    stack: Stack | None
    over_ep: bool
    compute: Compute | None = None

    @property
    def quantisation(self) -> Quantisation | None:
        """How the matrices are to be held; None as they are."""
        return None if self.compute is None else self.compute.quantisation

    def local_LOI(self, ep_size: int) -> tuple[int, int, int]:
        """Experts of a rank, rows and columns of a stacked matrix, whatever way it is kept."""
        experts, rows, columns = self.parameter.shape
        turned = self.compute is not None and self.compute.transposed
        return (experts // ep_size, *((columns, rows) if turned else (rows, columns)))


Places = dict[nn.Parameter, Place]


def find_places(
    model: nn.Module, experts: Iterable[nn.Module], plan: ModelPlan, options: ShardOptions
) -> Places:
    """Find every parameter of `model` that is to be given a value; `experts` are its experts."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    factors = {factor.parameter: factor.stack for factor in stacked_factors(model)}
    stacked = {
        parameter
        for module in experts
        for name, parameter in module.named_parameters()
        if parameter in factors or name.rpartition(".")[2] in plan.expert_weights
    }
    quantised = _find_quantised(experts)
    return {
        parameter: Place(
            parameter,
            where,
            factors.get(parameter),
            parameter in stacked,
            quantised.get(parameter),
        )
        for parameter, where in owners.items()
        if type(parameter) is nn.Parameter and parameter not in options.ignored_params
    }


def _find_quantised(experts: Iterable[nn.Module]) -> dict[nn.Parameter, Compute]:
    """Find the stacked matrices that are to be quantised, and how their module is computed."""
    found: dict[nn.Parameter, Compute] = {}
    for module in (inner for wrapped in experts for inner in wrapped.modules()):
        layer = vars(module).get(STATE)
        compute = layer.compute if isinstance(layer, MoELayer) else None
        if compute is not None and compute.quantisation is not None:
            found |= {getattr(module, name): compute for name in compute.parameters}
    return found


def materialize(place: Place, meshes: Meshes, options: ShardOptions) -> list[nn.Parameter]:
    """Give one parameter rank 0's value, as it is to lie on this rank.

    Returns what there is now in its place: one parameter, or bytes and their scales.
    """
    value = place.parameter.detach()
    if place.parameter not in options.empty_params:
        value = from_rank0(value, meshes.device)
    if place.stack is not None:
        value = place.stack(value)
    over_ep = place.over_ep and meshes.ep_size > 1
    if over_ep:
        value = _own_experts(value, meshes)
    if _wants_master(place.parameter, options):
        value = value.to(torch.float32)
    made = []
    for suffix, held in _as_held(value, place).items():
        held = held.contiguous()
        if over_ep:
            held = DTensor.from_local(held, meshes.ep, [Shard(0)], run_check=False)
        made.append(_register(held, place, suffix))
    return made


def _as_held(value: Tensor, place: Place) -> dict[str, Tensor]:
    """Return what is held of a value, by what is put behind its parameter's name."""
    if place.compute is None or place.quantisation is None:
        return {"": value}
    value_LOI = value.transpose(1, 2) if place.compute.transposed else value
    return quantise_stack(value_LOI, place.quantisation).by_name("")


def from_rank0(tensor: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's values onto `device`; on rank 0 that may be the tensor itself."""
    if dist.get_rank() == 0:
        value = tensor.to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value, src=0)
    return value


def _own_experts(value: Tensor, meshes: Meshes) -> Tensor:
    """Cut this ep rank's share out along dim 0, without the memory of the rest."""
    return value.chunk(meshes.ep_size)[meshes.ep_rank].clone()


def _wants_master(parameter: nn.Parameter, options: ShardOptions) -> bool:
    return options.fp32_masters and parameter.requires_grad and parameter.is_floating_point()


def _register(value: Tensor, place: Place, suffix: str) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=place.parameter.requires_grad)
    for module, name in place.owners:
        setattr(module, name + suffix, parameter)
    return parameter


def hold_correction_biases(
    model: nn.Module, options: ShardOptions, device: torch.device
) -> frozenset[nn.Parameter]:
    """Give correction biases that are parameters rank 0's values; returns those there are now.

    They are to be whole on every rank and in their own dtype, as those that are buffers: rounded to
    bf16 they would choose other experts.
    """
    held: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad or not is_correction_bias(name):
                continue
            if parameter not in held:
                value = parameter.detach()
                if parameter not in options.empty_params:
                    value = from_rank0(value, device)
                held[parameter] = nn.Parameter(value, requires_grad=False)
            setattr(module, name, held[parameter])
    return frozenset(held.values())


def broadcast_unsharded(model: nn.Module, options: ShardOptions, device: torch.device) -> None:
    """Give what no unit holds rank 0's values: buffers, and parameters that FSDP2 is to ignore."""
    for parameter in model.parameters():
        # In place, because FSDP2 knows an ignored parameter by its identity.
        if parameter in options.ignored_params and type(parameter) is nn.Parameter:
            parameter.data = from_rank0(parameter.detach(), device)
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = from_rank0(buffer.detach(), device)
