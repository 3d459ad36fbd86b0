"""Move experts to other slots: send their bytes to the ranks that own the new slots.

A slot is one row of a stacked tensor [E, ..]; in hub order, expert e is in slot e. The tensor is
sharded over (ep_fsdp, ep), and replicas have equal shards. Rank (f, d), with ep_fsdp rank f and ep
rank d, has a shard of the slots of ep rank d. `sharding/expert_units.py` chooses the dim of the
shard:

    ep_fsdp shards columns    rank (f, d) has some columns of every slot of ep rank d, and sends
                              them to the rank with the same f that owns the new slot
    ep_fsdp shards slots      rank (f, d) has all columns of some slots of ep rank d, and sends a
                              slot to the rank whose shard contains the new slot

Each tensor needs one all-to-all, which contains only the rows that move, so a rank needs memory for
the rows that it sends and receives. The gradient of a parameter and its optimizer state are sharded
like the parameter, and move in the same way. All moves are in place. A number in the optimizer
state (such as `step`) belongs to all experts and is not moved.
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
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.ranks.all_ranks import check_alike
from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.ranks.mesh import EP, EP_FSDP, Meshes
from hf_moe_ep.state import ModelState, MoELayer, iterate_experts_modules
from hf_moe_ep.upstream.adapters import wraps_for_adapters


@dataclass(frozen=True)
class ExpertTensors:
    """A MoE layer, and its parameters with one row per expert: weights, biases, scales, adapters.

    Attributes:
        path: the name of the experts module.
        parameters: the parameters by name.
    """

    layer: MoELayer
    path: str
    parameters: dict[str, DTensor]


def find_expert_tensors(model: nn.Module) -> list[ExpertTensors]:
    """Find the parameters that move with experts, layer by layer; the model must be resharded."""
    modules = dict(model.named_modules())
    tensors = []
    for path, _, layer in iterate_experts_modules(model):
        # PEFT's wrappers of the experts module contain its adapters. The decoder layer may contain
        # other experts modules as well, so the search must not go further up.
        outermost = path
        while wraps_for_adapters(modules[outermost.rpartition(".")[0]]):
            outermost = outermost.rpartition(".")[0]
        parameters = {
            f"{outermost}.{name}": parameter
            for name, parameter in modules[outermost].named_parameters()
            if isinstance(parameter, DTensor) and EP in (parameter.device_mesh.mesh_dim_names or ())
        }
        tensors.append(ExpertTensors(layer, path, parameters))
    return tensors


def check_trained(tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]) -> None:
    """Raise ValueError if a trained parameter of experts is in none of the optimizers."""
    optimized = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for layer_tensors in tensors:
        for name, parameter in layer_tensors.parameters.items():
            if optimizers and parameter.requires_grad and id(parameter) not in optimized:
                raise ValueError(
                    f"{name} is trained, but is not a parameter of this optimizer: if another "
                    f"optimizer has state for this parameter, the state would not move with the "
                    f"experts; pass the optimizer that was created after the model was sharded"
                )


def check_movable(tensors: Iterable[ExpertTensors], optimizers: Sequence[Any]) -> None:
    """Raise ValueError if an optimizer's state cannot be divided by experts.

    The state can be divided if each entry is a number, or a tensor that is sharded like its
    parameter.
    """
    for layer_tensors in tensors:
        for name, parameter in layer_tensors.parameters.items():
            for optimizer in optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    _check_state_entry(f"{key} of {name}", value, parameter, optimizer)


def _check_state_entry(entry: str, value: Any, parameter: DTensor, optimizer: Any) -> None:
    if not isinstance(value, Tensor) or not value.ndim or _is_sharded_like(value, parameter):
        return
    kind = type(getattr(optimizer, "optimizer", optimizer))
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} has a {type(value).__name__} "
        f"{tuple(value.shape)} as {entry}, but the parameter is {tuple(parameter.shape)}: experts "
        f"cannot move, because it is unknown which part of the state belongs to which expert; use "
        f"an optimizer whose state has the shape of its parameters, like torch.optim.AdamW"
    )


def _is_sharded_like(value: Any, parameter: DTensor) -> bool:
    return (
        isinstance(value, DTensor)
        and value.shape == parameter.shape
        and value.placements == parameter.placements
    )


def move_layers(
    tensors: Iterable[ExpertTensors],
    slots_of_layers: Sequence[Tensor | None],
    state: ModelState,
    optimizers: Sequence[Any],
) -> None:
    """Move the experts of all layers to new slots; every rank calls this with the same slots.

    Args:
        tensors: the layers of this rank's pipeline stage.
        slots_of_layers: the new slots of each layer of the model, as `move_experts` takes them.
    """
    assert state.meshes is not None
    for layer_tensors in tensors:
        slots_E = slots_of_layers[layer_tensors.layer.index]
        move_experts(layer_tensors, slots_E, state.meshes, optimizers)
    for layer in state.moe_layers:  # also layers whose experts other stages have moved
        layer.slots_E = slots_of_layers[layer.index]


@torch.no_grad()
def move_experts(
    tensors: ExpertTensors, slots_E: Tensor | None, meshes: Meshes, optimizers: Sequence[Any]
) -> None:
    """Move the experts of a layer to new slots; every rank calls this with the same slots.

    `slots_E` has the new slot of each expert, or is None for hub order. The layer stores it.
    """
    layer = tensors.layer
    old_slots_E = list_slots_of_experts(layer.slots_E, layer.model.num_experts)
    new_slots_E = list_slots_of_experts(slots_E, layer.model.num_experts)
    moves = [Move(old, new) for old, new in zip(old_slots_E, new_slots_E, strict=True)]
    moves = [move for move in moves if move.old != move.new]
    for name, parameter in tensors.parameters.items() if moves else ():
        where = f"moving experts of {name}"
        _exchange_rows(parameter, moves, meshes, where)
        for _, tensor in _iterate_tensors_that_move_with(parameter, optimizers):
            _exchange_rows(tensor, moves, meshes, where)
    layer.slots_E = slots_E


def list_slots_of_experts(slots_E: Tensor | None, num_experts: int) -> list[int]:
    """List the slot of each expert; in hub order expert e has slot e."""
    if slots_E is None:
        return list(range(num_experts))
    return slots_E.tolist()


def check_same_tensors(
    what: str, tensors: Iterable[ExpertTensors], optimizers: Sequence[Any], meshes: Meshes
) -> None:
    """Check that the same tensors move with the experts on all ranks of a pipeline stage.

    Raises:
        ValueError: on every rank of the stage; the message has the tensors of two ranks, counted
            by kind.
    """
    names = [
        f"{key} of {name}"
        for layer_tensors in tensors
        for name, parameter in layer_tensors.parameters.items()
        for key, _ in _iterate_tensors_that_move_with(parameter, optimizers)
    ]
    kinds = Counter(name.partition(" of ")[0] for name in names)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:12]
    moved = f"{counts or 'no tensors'} ({digest}) that move with experts"
    check_alike(what, meshes.stage_group, optimizer=moved)


def _iterate_tensors_that_move_with(
    parameter: DTensor, optimizers: Sequence[Any]
) -> Iterator[tuple[str, DTensor]]:
    """Yield the gradient of a parameter and the tensors of its optimizer state, with their names.

    A tensor that several optimizers have is yielded once.
    """
    yielded = set()
    if isinstance(parameter.grad, DTensor):
        yield "grad", parameter.grad
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_sharded_like(value, parameter) and id(value) not in yielded:
                yielded.add(id(value))
                yield key, value


class Move(NamedTuple):
    """The slots of an expert before and after its move."""

    old: int
    new: int


class _Position(NamedTuple):
    """The position of a slot: the rank (in the process group) and the row of that rank's shard."""

    rank: int
    row: int


def _exchange_rows(tensor: DTensor, moves: list[Move], meshes: Meshes, where: str) -> None:
    """Send the rows of this rank to their new slots, and store the rows that this rank receives."""
    group = _find_group(meshes)
    positions, this_rank = _find_positions(tensor, group), dist.get_rank(group)
    # Entries are (the other rank, new slot, local row). After sorting, sender and receiver have the
    # same order of rows: by rank, as an all-to-all requires, and then by new slot.
    outgoing = sorted(
        (positions[new].rank, new, positions[old].row)
        for old, new in moves
        if positions[old].rank == this_rank
    )
    incoming = sorted(
        (positions[old].rank, new, positions[new].row)
        for old, new in moves
        if positions[new].rank == this_rank
    )
    local = tensor.to_local().detach()
    # Rows are moved as bytes, because some dtypes can neither be indexed nor sent.
    row_bytes = local.element_size() * math.prod(local.shape[1:])
    rows_LX = local.view(torch.uint8).view(len(local), row_bytes)
    # Parameters that FSDP2 offloads are on the host, but the all-to-all needs them on the device.
    device = torch.device(tensor.device_mesh.device_type)
    sent_NX = rows_LX.index_select(0, _make_row_index(outgoing, local.device)).to(device)
    received_RX = sent_NX.new_empty(len(incoming), row_bytes)
    num_ranks = dist.get_world_size(group)
    transfer = start_all_to_all(
        received_RX,
        sent_NX,
        send_counts=_count_by_rank(outgoing, num_ranks),
        recv_counts=_count_by_rank(incoming, num_ranks),
        group=group,
        where=where,
    )
    transfer.wait()
    rows_LX.index_copy_(0, _make_row_index(incoming, local.device), received_RX.to(local.device))


def _make_row_index(entries: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor([row for _, _, row in entries], dtype=torch.int64, device=device)


def _count_by_rank(entries: list[tuple[int, int, int]], num_ranks: int) -> list[int]:
    counts = [0] * num_ranks
    for rank, _, _ in entries:
        counts[rank] += 1
    return counts


def _find_group(meshes: Meshes) -> dist.ProcessGroup:
    """Return a process group that contains all ranks of one replica of the experts."""
    if meshes.ep_fsdp_size == 1:
        return meshes.ep.get_group()
    if meshes.experts is not None:
        return meshes.experts.get_group()
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _find_positions(tensor: DTensor, group: dist.ProcessGroup) -> list[_Position]:
    """Find the position of each slot in this rank's replica, for the columns that this rank has."""
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    fsdp, ep = names.index(EP_FSDP), names.index(EP)
    placement = tensor.placements[fsdp]
    shards_slots = not isinstance(placement, Replicate) and placement.dim == 0  # type: ignore[attr-defined]
    slots_per_rank = tensor.shape[0] // mesh.size(ep)
    num_shards = mesh.size(fsdp) if shards_slots else 1
    slots_per_shard = -(-slots_per_rank // num_shards)
    positions = []
    for ep_rank, slot in product(range(mesh.size(ep)), range(slots_per_rank)):
        owner = list(coordinate)
        owner[ep] = ep_rank
        if shards_slots:
            owner[fsdp] = slot // slots_per_shard
        rank = dist.get_group_rank(group, int(mesh.mesh[tuple(owner)]))
        positions.append(_Position(rank, slot % slots_per_shard))
    return positions
