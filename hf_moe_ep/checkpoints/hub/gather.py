"""Send the values of sharded parameters to rank 0 or to all ranks, shard by shard.

A box is the index range of a shard in each dim of the tensor. A slab is the part of a tensor that a
range of dim 0 selects.

`iterate_slabs` sends a tensor to rank 0, one shard after the other. It broadcasts a shard along one
mesh axis, then along the next. Besides its own shards, a rank therefore needs memory for one shard
of another rank; if experts are sharded along dim 1, rank 0 needs memory for the experts of one ep
rank. For a stacked weight on a mesh (ep_fsdp 2, ep 2), with ranks [[0, 1], [2, 3]]:

    quarter of the experts   owner      sent along ep_fsdp   sent along ep
    first                    rank 0     -                    -
    second                   rank 2     2 to 0               -
    third                    rank 1     -                    1 to 0
    fourth                   rank 3     3 to 1               1 to 0

An all-gather would need memory for the whole tensor on every rank, and with gloo for two copies.

`iterate_slabs_for_all` sends a tensor to all ranks, one slab after the other. The owner of rows
broadcasts them along the first axis; then every rank that has the rows broadcasts them along the
next axis. In the table above, the second shard is sent from rank 2 to 0, then from 2 to 3 and from
0 to 1. Each rank receives each byte once. The owner changes its values, for example by a cast,
before it sends them.

`gather_changed` and `gather_tensor` use all-gathers and return a whole tensor on every rank.
`gather_state_dict` calls `gather_tensor` for one tensor after the other, and rank 0 keeps them;
`gather_adapters` also casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.etp import restore_stock_shapes
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.moe.stacked import make_stock_tensors
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import is_first, run_on_first, this_rank
from hf_moe_ep.ranks.boxes import (
    Box,
    get_box_at,
    get_box_sizes,
    get_local_box,
    intersect_boxes,
    iterate_whole_tensor,
    make_slices,
    make_whole_box,
)
from hf_moe_ep.ranks.mesh import Stages
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.adapters import has_adapters, list_saved_adapters, map_keys_by_adapter
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap
from hf_moe_ep.upstream.process_groups import choose_device_of_objects

# Tensors of at most this many bytes (norms, routers) are gathered whole instead of shard by shard.
SMALL = 2**20

# Computes the tensor to send from a box of a parameter and the values in that box.
Change = Callable[[Box, Tensor], Tensor]


@torch.no_grad()
def gather_state_dict(
    model: nn.Module, save_embedding_layers: str | bool = "auto"
) -> dict[str, Tensor]:
    """Return the full state dict on rank 0, in host memory, and {} on other ranks.

    Every rank calls this.

    For a model with adapters only the tensors that PEFT saves are gathered, in the shapes in which
    PEFT saves them. `save_embedding_layers` is the argument of PEFT's save_pretrained.
    """
    inner, state = unwrap(model), find_state(model)
    with experts_in_hub_order(model):
        if state is not None and state.meshes is not None and state.meshes.stages is not None:
            return _gather_stages(inner, state, state.meshes.stages, save_embedding_layers)
        state_dict = inner.state_dict()
        # Rank 0 decides, because PEFT reads files that other ranks may not have.
        names = run_on_first(
            "gathering adapters",
            lambda: list_saved_adapters(inner, state_dict, save_embedding_layers),
        )
        return _gather_named(inner, state_dict, names, keep=is_first())


def gather_adapters(
    model: nn.Module, save_embedding_layers: str | bool = "auto"
) -> dict[str, Tensor]:
    """Return what `gather_state_dict` returns, in the dtypes that parameters had before sharding.

    A module in modules_to_save may have fp32 master weights. They are rounded, as `save_pretrained`
    rounds those of a model without adapters.
    """
    state = find_state(model)
    dtypes: dict[str, torch.dtype] = {} if state is None else state.dtypes
    gathered = gather_state_dict(model, save_embedding_layers)
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in gathered.items()}


def _gather_named(
    model: nn.Module, state_dict: dict[str, Tensor], names: Iterable[str] | None, *, keep: bool
) -> dict[str, Tensor]:
    """Gather tensors of a state dict by name; only ranks with `keep` store them."""
    full: dict[str, Tensor] = {}
    for name in state_dict if names is None else names:
        gathered = gather_tensor(state_dict[name])
        if keep:
            full[get_canonical_name(name)] = gathered.detach().cpu()
    return make_stock_tensors(model, pack_factors(model, restore_stock_shapes(model, full)))


def _gather_stages(
    model: nn.Module, state: ModelState, stages: Stages, save_embedding_layers: str | bool
) -> dict[str, Tensor]:
    """Gather the tensors of each stage on its first rank, then send all of them to rank 0.

    Rank 0 stores the keys of PEFT's files in `stage.keys_of_adapters`.
    """
    stage, state_dict = state.stage, model.state_dict()
    names: Iterable[str] | None = None
    keys: dict[str, dict[str, str]] = {}
    if has_adapters(model):

        def saves_embeddings() -> bool:
            as_requested = map_keys_by_adapter(model, state_dict, save_embedding_layers)
            return as_requested != map_keys_by_adapter(model, state_dict, False)

        # The first stage has the embedding, so rank 0 can decide for all.
        saves = run_on_first("gathering adapters", saves_embeddings)
        keys = map_keys_by_adapter(model, state_dict, saves)
        names = list(dict.fromkeys(name for by_key in keys.values() for name in by_key.values()))
    keep = this_rank() in stages.first_ranks
    full = _gather_named(model, state_dict, names, keep=keep)
    if not keep:
        return {}
    # Copies of tied weights are left out; the first stage has them.
    name_on_first_stage: dict[str, str] = stage.aliases
    own = {name: tensor for name, tensor in full.items() if name not in name_on_first_stage}
    own_keys = {
        adapter: {
            key: name_on_first_stage.get(get_canonical_name(name), get_canonical_name(name))
            for key, name in by_key.items()
        }
        for adapter, by_key in keys.items()
    }
    by_stage = _send_to_first((own, own_keys), stages)
    joined: dict[str, Tensor] = {}
    joined_keys: dict[str, dict[str, str]] = {adapter: {} for adapter in keys}
    for tensors, keys_of_stage in by_stage:
        joined |= tensors
        for adapter, by_key in keys_of_stage.items():
            joined_keys[adapter] |= by_key
    if is_first():
        stage.keys_of_adapters = joined_keys
    order = {name: number for number, name in enumerate(stage.tensors)}
    return dict(sorted(joined.items(), key=lambda item: order.get(item[0], len(order))))


def _send_to_first(own: Any, stages: Stages) -> list[Any]:
    """Return the values of all stages on rank 0, and [] on the first ranks of other stages."""
    group, (_, *others) = stages.column.get_group(), stages.first_ranks
    device = choose_device_of_objects(group)
    if not is_first():
        dist.send_object_list([own], 0, group=group, device=device)
        return []
    by_stage = [own]
    for rank in others:
        received: list[Any] = [None]
        dist.recv_object_list(received, rank, group=group, device=device)
        by_stage += received
    return by_stage


@torch.no_grad()
def iterate_slabs(tensor: Tensor) -> Iterator[tuple[Box, Tensor | None]]:
    """Yield (box, values) of a parameter in host memory of its first rank.

    Every rank that holds a part of the parameter iterates to the end. The first of these ranks is
    rank 0, or the first rank of a pipeline stage. Only this rank may use the results. On other
    ranks a large sharded tensor yields None, a small one yields nothing, and a tensor that is not
    sharded yields its values.
    """
    if not isinstance(tensor, DTensor):
        yield from iterate_whole_tensor(tensor.detach().cpu())
        return
    if tensor.numel() * tensor.element_size() <= SMALL:
        gathered = gather_tensor(tensor)
        yield from iterate_whole_tensor(gathered.detach().cpu()) if _is_first_of(tensor) else ()
        return
    slab: Tensor | None = None
    for box, part in _gather_shards(tensor):
        slab_box = (box[0], *((0, size) for size in tensor.shape[1:]))
        if part is not None and box == slab_box:
            slab = part.cpu()
        elif part is not None:
            if slab is None:
                slab = torch.empty(get_box_sizes(slab_box), dtype=part.dtype)
            slab[make_slices(box, slab_box)].copy_(part)
        del part
        if all(stop == end for (_, stop), (_, end) in zip(box, slab_box, strict=True)):
            # This was the last shard of these rows.
            yield slab_box, slab
            slab = None


def _gather_shards(tensor: DTensor) -> Iterator[tuple[Box, Tensor | None]]:
    """Yield (box, values) of each shard in order; the values are None except on the first rank."""
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate() or ())
    # FSDP2 may offload parameters to the host, but the process groups communicate on the device.
    local = tensor.to_local().detach().contiguous().to(mesh.device_type)
    sharded = _list_sharded_axes(tensor)
    for owner, box in _list_shards(tensor, (0,) * mesh.ndim):
        part = local if owner == coordinate else None
        # Broadcast axis by axis, from the owner to rank 0, which has the coordinate 0, 0, ..
        position = list(owner)
        for axis in sharded:
            source, position[axis] = int(mesh.mesh[tuple(position)]), 0
            other_axes = (i for i in range(mesh.ndim) if i != axis)
            takes_part = all(coordinate[i] == position[i] for i in other_axes)
            if owner[axis] == 0 or not takes_part:
                continue
            if part is None:
                part = torch.empty(get_box_sizes(box), dtype=local.dtype, device=local.device)
            dist.broadcast(part, src=source, group=mesh.get_group(axis))
        yield box, part if _is_first_of(tensor) else None
        del part


def _is_first_of(tensor: DTensor) -> bool:
    """Return True on the first of the ranks that hold a tensor."""
    return not any(tensor.device_mesh.get_coordinate() or ())


@torch.no_grad()
def iterate_slabs_for_all(
    tensor: Tensor,
    dtype: torch.dtype,
    change: Change,
    max_bytes: int,
    slots_E: Tensor | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield (box, values) of a parameter on the compute device; every rank iterates to the end.

    Args:
        dtype: the dtype of the tensors that `change` returns.
        change: called for each part of a slab by the rank that owns the part.
        max_bytes: the largest size of a slab; a slab has at least one row of dim 0.
        slots_E: the row in which each expert is stored, or None if experts are stored in order.
            `change` is called with stored rows; slabs are yielded in the order of the experts.
    """
    boxes = list_slabs(tensor, dtype, max_bytes)
    if len(boxes) == 1:
        gathered = gather_changed(tensor, change)
        gathered = gathered if slots_E is None else gathered[slots_E.to(gathered.device)]
        yield boxes[0], gathered
        return
    for rows in boxes:
        start, stop = rows[0]
        if slots_E is not None:
            assert isinstance(tensor, DTensor)
            stored = ((slot, slot + 1) for slot in slots_E[start:stop].tolist())
            experts = [_send_rows(tensor, (row, *rows[1:]), dtype, change) for row in stored]
            yield rows, experts[0] if len(experts) == 1 else torch.cat(experts)
        elif isinstance(tensor, DTensor):
            yield rows, _send_rows(tensor, rows, dtype, change)
        else:
            yield rows, change(rows, tensor.detach()[start:stop])


def list_slabs(tensor: Tensor, dtype: torch.dtype, max_bytes: int) -> list[Box]:
    """List, in order, the boxes of the slabs into which `iterate_slabs_for_all` cuts a tensor."""
    num_bytes = tensor.numel() * dtype.itemsize
    if num_bytes <= max_bytes or tensor.ndim == 0:
        return [make_whole_box(tensor.shape)]
    step = max(1, max_bytes // (num_bytes // len(tensor)))
    inner = make_whole_box(tensor.shape[1:])
    ends = ((start, min(start + step, len(tensor))) for start in range(0, len(tensor), step))
    return [(rows, *inner) for rows in ends]


def gather_changed(tensor: Tensor, change: Change) -> Tensor:
    """Change each rank's shard and gather the results on the compute device of every rank."""
    if not isinstance(tensor, DTensor):
        return change(get_local_box(tensor), tensor.detach())
    mesh = tensor.device_mesh
    local = change(get_local_box(tensor), tensor.to_local().detach().to(mesh.device_type))
    changed = DTensor.from_local(
        local,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return gather_tensor(changed)


def _send_rows(tensor: DTensor, rows: Box, dtype: torch.dtype, change: Change) -> Tensor:
    """Send the box `rows` of a parameter to every rank; each owner sends its part."""
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate() or ())
    shard_box, shard = get_local_box(tensor), tensor.to_local().detach()
    slab = torch.empty(get_box_sizes(rows), dtype=dtype, device=mesh.device_type)
    for owner, box in _list_shards(tensor, coordinate):
        part = intersect_boxes(box, rows)
        if part is None:
            continue
        target = slab[make_slices(part, rows)]
        values = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        if owner == coordinate:
            values.copy_(change(part, shard[make_slices(part, shard_box)].to(mesh.device_type)))
        _send_to_all(values, tensor, owner)
        if values is not target:
            target.copy_(values)
    return slab


def _send_to_all(values: Tensor, tensor: DTensor, owner: tuple[int, ...]) -> None:
    """Broadcast from the rank at `owner` along one axis, then from all receivers along the next."""
    mesh = tensor.device_mesh
    coordinate = tuple(mesh.get_coordinate() or ())
    axes = _list_sharded_axes(tensor)
    for number, axis in enumerate(axes):
        if any(coordinate[later] != owner[later] for later in axes[number + 1 :]):
            continue
        source = (*coordinate[:axis], owner[axis], *coordinate[axis + 1 :])
        dist.broadcast(values, src=int(mesh.mesh[source]), group=mesh.get_group(axis))


def _list_sharded_axes(tensor: DTensor) -> list[int]:
    placements = enumerate(tensor.placements)
    return [axis for axis, placement in placements if not isinstance(placement, Replicate)]


def _list_shards(tensor: DTensor, replica: tuple[int, ...]) -> list[tuple[tuple[int, ...], Box]]:
    """List (mesh coordinate of the owner, box) of all shards, in the order of the boxes.

    Args:
        replica: a mesh coordinate. The owners of the listed shards are in the same replica.
    """
    mesh, sharded = tensor.device_mesh, _list_sharded_axes(tensor)
    ranges = [
        range(mesh.size(axis)) if axis in sharded else (replica[axis],) for axis in range(mesh.ndim)
    ]
    boxes = [(owner, get_box_at(tensor, owner)) for owner in product(*ranges)]
    not_empty = [item for item in boxes if all(start < stop for start, stop in item[1])]
    return sorted(not_empty, key=lambda item: item[1])


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor on every rank that holds a part of it; return any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    # FSDP2 may offload parameters to the host, but the process groups communicate on the device.
    tensor = DTensor.from_local(
        tensor.to_local().to(mesh.device_type),
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    # One mesh axis at a time: DTensor warns on every rank if it must choose the order itself.
    for axis in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
