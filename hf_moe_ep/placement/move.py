"""Experts that go to other slots: their bytes, from the rank that has them to the one that will.

A stacked tensor [E, ..] lies over (ep_fsdp, ep), and over replicas alike. Rank (f, d) holds, of
every slot of ep rank d, its own columns, or some of its slots whole, as `sharding/shard.py` chose:

    ep_fsdp cuts columns    a slot's columns go to the rank of the same f; over ep alone
    ep_fsdp cuts slots      a slot goes to whichever rank holds its new place

One all-to-all per tensor, of the rows that move and of nothing else: no rank ever has more than
what it sends and what it gets beside its own. Whatever lies like a parameter goes with it, in
place: its gradient, and what an optimizer keeps of it. A number (`step`) is every expert's, and
stays.
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
    """A MoE layer, and what of it has one row per expert: weights, biases, scales, adapters.

    Attributes:
        path: the name of its experts module.
        parameters: by name.
    """

    layer: MoELayer
    path: str
    parameters: dict[str, DTensor]


def find_expert_tensors(model: nn.Module) -> list[ExpertTensors]:
    """Find what moves with the experts of a resharded model, layer by layer."""
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        layer = vars(module).get(STATE)
        if not isinstance(layer, MoELayer):
            continue
        # Adapters are wrapped around the module, and in its unit.
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
    """Raise ValueError where an expert's parameter is trained, and in none of the optimizers."""
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
                    f"{name} is trained, and is no parameter of this optimizer: what is kept of "
                    f"it elsewhere would stay behind when its experts move; pass the optimizer "
                    f"that was made of this model after it was sharded"
                )


def check_movable(tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]) -> None:
    """Raise where an optimizer keeps of an expert what cannot be told apart from others'.

    Raises:
        ValueError: it keeps something else than tensors that lie as the parameter, and numbers.
    """
    for one in tensors:
        for name, parameter in one.parameters.items():
            for optimizer in optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    _check_kept(f"{key} of {name}", value, parameter, optimizer)


def _check_kept(where: str, value: Any, parameter: DTensor, optimizer: Any) -> None:
    if not isinstance(value, Tensor) or not value.ndim or _lies_like(value, parameter):
        return
    kind = type(getattr(optimizer, "optimizer", optimizer))
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} keeps as {where} a {type(value).__name__} "
        f"{tuple(value.shape)} beside a parameter {tuple(parameter.shape)}: which part of it "
        f"belongs to which expert is unknown, so experts cannot move; take an optimizer whose "
        f"state has the shape of its parameters, like torch.optim.AdamW"
    )


def _lies_like(value: Any, parameter: DTensor) -> bool:
    return (
        isinstance(value, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
    )


@torch.no_grad()
def move_experts(
    one: ExpertTensors, after: Tensor | None, meshes: Meshes, optimizers: Sequence[Any]
) -> None:
    """Bring the experts of a layer to other slots; every rank calls this with the same.

    `after` is the slot of each expert, None for hub order. The layer is told.
    """
    layer = one.layer
    before_E = slots_of(layer.placement, layer.model.num_experts)
    after_E = slots_of(after, layer.model.num_experts)
    moves = [Move(old, new) for old, new in zip(before_E, after_E, strict=True) if old != new]
    for name, parameter in one.parameters.items() if moves else ():
        where = f"moving experts of {name}"
        _exchange(parameter, moves, meshes, where)
        for _, tensor in _company(parameter, optimizers):
            _exchange(tensor, moves, meshes, where)
    layer.placement = after


def slots_of(placement: Tensor | None, num_experts: int) -> list[int]:
    """List the slot of each expert; in hub order expert e has slot e."""
    if placement is None:
        return list(range(num_experts))
    slots: list[int] = placement.tolist()
    return slots


def check_same_company(
    what: str, tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]
) -> None:
    """Raise on every rank where one would send of an expert what another does not wait for.

    Raises:
        ValueError: it names two ranks, and what moves with the experts of each.
    """
    names = [
        f"{key} of {name}"
        for one in tensors
        for name, parameter in one.parameters.items()
        for key, _ in _company(parameter, optimizers)
    ]
    kinds = Counter(name.partition(" of ")[0] for name in names)
    counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:12]
    check_alike(what, optimizer=f"{counted or 'nothing'} ({digest}) beside its experts")


def _company(parameter: DTensor, optimizers: Sequence[Any]) -> Iterator[tuple[str, DTensor]]:
    """Yield what lies like a parameter: each tensor once, whoever else is given it."""
    seen = set()
    if isinstance(parameter.grad, DTensor):
        yield "grad", parameter.grad
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if _lies_like(value, parameter) and id(value) not in seen:
                seen.add(id(value))
                yield key, value


class Move(NamedTuple):
    """An expert's slot before and after."""

    old: int
    new: int


class _Home(NamedTuple):
    """Where a slot lies: the rank in the group that exchanges, and the row of its part."""

    rank: int
    row: int


def _exchange(tensor: DTensor, moves: list[Move], meshes: Meshes, where: str) -> None:
    """Send the rows of this rank that move, and put those that come into their places."""
    group = _group_of(meshes)
    homes, me = _homes(tensor, group), dist.get_rank(group)
    # Both sides list rows by the other's rank, and then by their new slots.
    leaving = sorted(
        (homes[new].rank, new, homes[old].row) for old, new in moves if homes[old].rank == me
    )
    coming = sorted(
        (homes[old].rank, new, homes[new].row) for old, new in moves if homes[new].rank == me
    )
    local = tensor.to_local().detach()
    # As bytes: not every dtype can be indexed, or sent.
    row_bytes = local.element_size() * math.prod(local.shape[1:])
    rows_LX = local.view(torch.uint8).view(len(local), row_bytes)
    # Parameters that FSDP2 offloads are on the host, their groups are not.
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
    """Choose a group that has all ranks of one copy of the experts."""
    if meshes.ep_fsdp_size == 1:
        return meshes.ep.get_group()
    if meshes.experts is not None:
        return meshes.experts.get_group()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _homes(tensor: DTensor, group: dist.ProcessGroup) -> list[_Home]:
    """Find where each slot lies, of the copy and of the columns that this rank has a part of."""
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    fsdp, ep = names.index(EP_FSDP), names.index(EP)
    placement = tensor.placements[fsdp]
    cuts_slots = not isinstance(placement, Replicate) and placement.dim == 0  # type: ignore[attr-defined]
    slots = tensor.shape[0] // mesh.size(ep)
    parts = mesh.size(fsdp) if cuts_slots else 1
    share = -(-slots // parts)
    homes = []
    for ep_rank, slot in product(range(mesh.size(ep)), range(slots)):
        at = list(coordinate)
        at[ep] = ep_rank
        if cuts_slots:
            at[fsdp] = slot // share
        rank = dist.get_group_rank(group, int(mesh.mesh[tuple(at)]))
        homes.append(_Home(rank, slot % share))
    return homes
