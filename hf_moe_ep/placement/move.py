"""Move experts to other slots: send their bytes to the ranks that own the new slots.

A stacked tensor [E, ..] is sharded over (ep_fsdp, ep); replicas have equal shards. As
`sharding/shard.py` has chosen, rank (f, d) has either some columns of all slots of ep rank d, or
some of these slots whole:

    ep_fsdp shards columns    a slot's columns are sent to the rank with the same f, over ep alone
    ep_fsdp shards slots      a slot is sent to the rank that has the shard of its new slot

Each tensor takes one all-to-all, which contains only the rows that move: a rank needs memory for
the rows that it sends and receives. Tensors that are sharded like the parameter move with it, in
place: its gradient, and the optimizer's state of it. A number (such as `step`) belongs to all
experts and stays.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.ranks.mesh import EP, EP_FSDP, Meshes
from hf_moe_ep.ranks.together import check_alike
from hf_moe_ep.state import STATE, MoELayer


@dataclass(frozen=True)
class ExpertTensors:
    """A MoE layer, and its tensors with one row per expert: weights, biases, scales, adapters.

    Attributes:
        path: the name of the experts module.
        parameters: the tensors by name.
    """

    layer: MoELayer
    path: str
    parameters: dict[str, DTensor]


def find_expert_tensors(model: nn.Module) -> list[ExpertTensors]:
    """Find the tensors that move with the experts of a resharded model, layer by layer."""
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        layer = vars(module).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        # PEFT wraps adapters around the module; they are in the same FSDP2 unit.
        unit = path
        while not isinstance(modules[unit], FSDPModule):
            unit = unit.rpartition(".")[0]
        parameters = {
            f"{unit}.{name}": parameter
            for name, parameter in modules[unit].named_parameters()
            if isinstance(parameter, DTensor) and EP in (parameter.device_mesh.mesh_dim_names or ())
        }
        found.append(ExpertTensors(layer, path, parameters))
    return found


def check_trained(tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]) -> None:
    """Raise ValueError if a trained parameter of experts is in none of the optimizers."""
    held = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for one in tensors:
        for name, parameter in one.parameters.items():
            if optimizers and parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"{name} is trained, but is no parameter of this optimizer: the state that "
                    f"another optimizer has of it would not move with its experts; pass the "
                    f"optimizer that was made of this model after it was sharded"
                )


def check_movable(tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]) -> None:
    """Raise ValueError if an optimizer's state cannot be divided by experts.

    It can if each entry is a number, or a tensor that is sharded like the parameter.
    """
    for one in tensors:
        for name, parameter in one.parameters.items():
            for optimizer in optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    _check_state_entry(f"{key} of {name}", value, parameter, optimizer)


def _check_state_entry(where: str, value: Any, parameter: DTensor, optimizer: Any) -> None:
    if not isinstance(value, Tensor) or not value.ndim or _is_sharded_like(value, parameter):
        return
    kind = type(getattr(optimizer, "optimizer", optimizer))
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} keeps as {where} a {type(value).__name__} "
        f"{tuple(value.shape)} for a parameter {tuple(parameter.shape)}: it is unknown which part "
        f"belongs to which expert, so experts cannot move; use an optimizer whose state has the "
        f"shape of its parameters, like torch.optim.AdamW"
    )


def _is_sharded_like(value: Any, parameter: DTensor) -> bool:
    return (
        isinstance(value, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
    )


@torch.no_grad()
def move_experts(
    one: ExpertTensors, after: Tensor | None, meshes: Meshes, optimizers: Sequence[Any]
) -> None:
    """Move the experts of a layer to the slots `after`; every rank calls this with the same slots.

    `after` has the slot of each expert; None means hub order. The layer stores it.
    """
    layer = one.layer
    before_E = slots_of(layer.placement, layer.model.num_experts)
    after_E = slots_of(after, layer.model.num_experts)
    moves = [Move(old, new) for old, new in zip(before_E, after_E, strict=True) if old != new]
    for name, parameter in one.parameters.items() if moves else ():
        where = f"moving experts of {name}"
        _exchange(parameter, moves, meshes, where)
        for _, tensor in _tensors_that_move_with(parameter, optimizers):
            _exchange(tensor, moves, meshes, where)
    layer.placement = after


def slots_of(placement: Tensor | None, num_experts: int) -> list[int]:
    """List the slot of each expert; in hub order expert e has slot e."""
    if placement is None:
        return list(range(num_experts))
    slots: list[int] = placement.tolist()
    return slots


def check_same_tensors(
    what: str, tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]
) -> None:
    """Check that the same tensors move with the experts on all ranks.

    Raises:
        ValueError: on every rank; it names two ranks, and the tensors that move on each.
    """
    names = [
        f"{key} of {name}"
        for one in tensors
        for name, parameter in one.parameters.items()
        for key, _ in _tensors_that_move_with(parameter, optimizers)
    ]
    kinds = Counter(name.partition(" of ")[0] for name in names)
    counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:12]
    check_alike(what, optimizer=f"{counted or 'no tensor'} ({digest}) with its experts")


def _tensors_that_move_with(
    parameter: DTensor, optimizers: Sequence[Any]
) -> Iterator[tuple[str, DTensor]]:
    """Yield the gradient and the optimizers' state of a parameter; each tensor once."""
    seen = set()
    if isinstance(parameter.grad, DTensor):
        yield "grad", parameter.grad
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_sharded_like(value, parameter) and id(value) not in seen:
                seen.add(id(value))
                yield key, value


class Move(NamedTuple):
    """The slot of an expert before and after."""

    old: int
    new: int


class _Position(NamedTuple):
    """The position of a slot: its rank in the group that exchanges, and its row in the shard."""

    rank: int
    row: int


def _exchange(tensor: DTensor, moves: list[Move], meshes: Meshes, where: str) -> None:
    """Exchange the experts that change rank: send ours, receive and store the others."""
    group = _group_of(meshes)
    positions, me = _positions(tensor, group), dist.get_rank(group)
    # Both sides list rows by the other's rank, and then by their new slots.
    leaving = sorted(
        (positions[new].rank, new, positions[old].row)
        for old, new in moves
        if positions[old].rank == me
    )
    coming = sorted(
        (positions[old].rank, new, positions[new].row)
        for old, new in moves
        if positions[new].rank == me
    )
    local = tensor.to_local().detach()
    # As bytes, because some dtypes can neither be indexed nor sent.
    row_bytes = local.element_size() * math.prod(local.shape[1:])
    rows_LX = local.view(torch.uint8).view(len(local), row_bytes)
    # Parameters that FSDP2 offloads are on the host, but their process groups are not.
    device = torch.device(tensor.device_mesh.device_type)
    sent_NX = rows_LX.index_select(0, _rows(leaving, local.device)).to(device)
    received_RX = sent_NX.new_empty(len(coming), row_bytes)
    ranks = dist.get_world_size(group)
    transfer = start_all_to_all(
        received_RX,
        sent_NX,
        send_counts=_per_rank(leaving, ranks),
        recv_counts=_per_rank(coming, ranks),
        group=group,
        where=where,
    )
    transfer.wait()
    rows_LX.index_copy_(0, _rows(coming, local.device), received_RX.to(local.device))


def _rows(moves: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor([row for _, _, row in moves], dtype=torch.int64, device=device)


def _per_rank(rows: list[tuple[int, int, int]], ranks: int) -> list[int]:
    counts = [0] * ranks
    for rank, _, _ in rows:
        counts[rank] += 1
    return counts


def _group_of(meshes: Meshes) -> dist.ProcessGroup:
    """Return a process group that contains all ranks of one replica of the experts."""
    if meshes.ep_fsdp_size == 1:
        return meshes.ep.get_group()
    if meshes.experts is not None:
        return meshes.experts.get_group()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _positions(tensor: DTensor, group: dist.ProcessGroup) -> list[_Position]:
    """Find the position of each slot in this rank's replica, for the columns of this rank."""
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    fsdp, ep = names.index(EP_FSDP), names.index(EP)
    placement = tensor.placements[fsdp]
    shards_slots = not isinstance(placement, Replicate) and placement.dim == 0  # type: ignore[attr-defined]
    slots = tensor.shape[0] // mesh.size(ep)
    parts = mesh.size(fsdp) if shards_slots else 1
    share = -(-slots // parts)
    positions = []
    for ep_rank, slot in product(range(mesh.size(ep)), range(slots)):
        at = list(coordinate)
        at[ep] = ep_rank
        if shards_slots:
            at[fsdp] = slot // share
        rank = dist.get_group_rank(group, int(mesh.mesh[tuple(at)]))
        positions.append(_Position(rank, slot % share))
    return positions
