"""What ranks hold of a model, brought to rank 0 or to all: by parts, or whole where it is small.

A tensor's parts come one after the other. A part travels along one mesh axis at a time, by
broadcast within that axis. So no rank holds more than another rank's part of one tensor beyond its
shards, and rank 0, where parts are cut along dim 1, the experts of one ep rank. For a stacked
weight on (ep_fsdp 2, ep 2), ranks [[0, 1], [2, 3]]:

    experts   held by    along ep_fsdp   along ep
    first     rank 0     -               -
    second    rank 2     2 to 0          -
    third     rank 1     -               1 to 0
    fourth    rank 3     3 to 1          1 to 0

An all-gather would need memory for the whole tensor on every rank, and gloo's for two of them.

To all ranks (`slabs_for_all`) go a few rows of dim 0 after the other. A part is broadcast from its
owner along the first axis, then by everyone who has it along the next one: (ep_fsdp 2, ep 2) above,
the second part from rank 2 to 0, then from 2 to 3 and from 0 to 1. Each rank receives each byte
once, and what happens to a part on the way, a cast, happens on its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.checkpoints.storage.boxes import Box, box_at, local_box, overlap, slices, whole
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.together import is_first, on_first
from hf_moe_ep.upstream.adapters import adapter_names
from hf_moe_ep.upstream.module_names import canonical_name, unwrap

# Bytes of a tensor that is gathered in one collective, for speed: norms, routers.
SMALL = 2**20

# Makes of a part of a parameter, and the part's place in it, what is sent: a new tensor.
Change = Callable[[Box, Tensor], Tensor]


@torch.no_grad()
def gather_state_dict(
    model: nn.Module, save_embedding_layers: str | bool = "auto"
) -> dict[str, Tensor]:
    """Gather full tensors on the host of rank 0, none elsewhere; every rank calls this.

    Of a model with adapters what PEFT saves, packed as PEFT packs it: the base stays where it is.
    `save_embedding_layers` as in PEFT's save_pretrained.
    """
    with experts_in_hub_order(model):
        return _gathered_by_name(unwrap(model), save_embedding_layers)


def _gathered_by_name(model: nn.Module, save_embedding_layers: str | bool) -> dict[str, Tensor]:
    keep = is_first()
    full: dict[str, Tensor] = {}
    state_dict = model.state_dict()
    # Rank 0 decides: PEFT looks into files that others may not have.
    names = on_first(
        "gathering adapters", lambda: adapter_names(model, state_dict, save_embedding_layers)
    )
    for name in state_dict if names is None else names:
        tensor = state_dict[name]
        gathered = gather_whole(tensor) if isinstance(tensor, DTensor) else tensor
        if keep:
            full[canonical_name(name)] = gathered.detach().cpu()
    return pack_factors(model, full)


@torch.no_grad()
def slabs_of(tensor: Tensor) -> Iterator[tuple[Box, Tensor | None]]:
    """Yield the values of a parameter for rank 0, on its host; every rank runs this to the end."""
    if not isinstance(tensor, DTensor):
        yield from whole(tensor.detach().cpu())
        return
    if tensor.numel() * tensor.element_size() <= SMALL:
        gathered = gather_whole(tensor)
        yield from whole(gathered.detach().cpu()) if is_first() else ()
        return
    slab: Tensor | None = None
    for box, part in _parts(tensor):
        rows = (box[0], *((0, size) for size in tensor.shape[1:]))
        if part is not None and box == rows:
            slab = part.cpu()
        elif part is not None:
            if slab is None:
                slab = torch.empty([stop - start for start, stop in rows], dtype=part.dtype)
            slab[slices(box, rows)].copy_(part)
        del part
        if all(stop == end for (_, stop), (_, end) in zip(box, rows, strict=True)):
            yield rows, slab
            slab = None


def _parts(tensor: DTensor) -> Iterator[tuple[Box, Tensor | None]]:
    """Yield what each rank holds of a parameter, in order, with its values on rank 0."""
    mesh = tensor.device_mesh
    here = tuple(mesh.get_coordinate() or ())
    # Parameters that FSDP2 offloads are on the host, their groups are not.
    mine = tensor.to_local().detach().contiguous().to(mesh.device_type)
    sharded = _sharded_axes(tensor)
    for owner, box in _owners(tensor, (0,) * mesh.ndim):
        shape = [stop - start for start, stop in box]
        part = mine if owner == here else None
        # Towards rank 0, which is at the origin.
        at = list(owner)
        for axis in sharded:
            source, at[axis] = int(mesh.mesh[tuple(at)]), 0
            in_line = all(here[i] == at[i] for i in range(mesh.ndim) if i != axis)
            if owner[axis] == 0 or not in_line:
                continue
            if part is None:
                part = torch.empty(shape, dtype=mine.dtype, device=mine.device)
            dist.broadcast(part, src=source, group=mesh.get_group(axis))
        yield box, part if is_first() else None
        del part


@torch.no_grad()
def slabs_for_all(
    tensor: Tensor,
    dtype: torch.dtype,
    change: Change,
    max_bytes: int,
    slots: Tensor | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the values of a parameter on every rank, where it computes; all run this to the end.

    Args:
        dtype: of what `change` returns.
        change: is called for each part by one rank that holds it.
        max_bytes: of a slab, which has one row of dim 0 at least.
        slots: where the row of each expert lies; `change` is told of parts as they lie, slabs are
            yielded in the order of the experts.
    """
    num_bytes = tensor.numel() * dtype.itemsize
    if num_bytes <= max_bytes or tensor.ndim == 0:
        gathered = gather_changed(tensor, change)
        gathered = gathered if slots is None else gathered[slots.to(gathered.device)]
        yield tuple((0, size) for size in tensor.shape), gathered
        return
    step = max(1, max_bytes // (num_bytes // len(tensor)))
    for start in range(0, len(tensor), step):
        stop = min(start + step, len(tensor))
        rows = ((start, stop), *((0, size) for size in tensor.shape[1:]))
        if slots is not None:
            assert isinstance(tensor, DTensor)
            lie = ((slot, slot + 1) for slot in slots[start:stop].tolist())
            each = [_spread(tensor, (at, *rows[1:]), dtype, change) for at in lie]
            yield rows, each[0] if len(each) == 1 else torch.cat(each)
        elif isinstance(tensor, DTensor):
            yield rows, _spread(tensor, rows, dtype, change)
        else:
            yield rows, change(rows, tensor.detach()[start:stop])


def gather_changed(tensor: Tensor, change: Change) -> Tensor:
    """Gather what each rank makes of its part of a tensor, on every rank, where it computes."""
    if not isinstance(tensor, DTensor):
        return change(local_box(tensor), tensor.detach())
    mesh = tensor.device_mesh
    mine = change(local_box(tensor), tensor.to_local().detach().to(mesh.device_type))
    changed = DTensor.from_local(
        mine,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return gather_whole(changed)


def _spread(tensor: DTensor, rows: Box, dtype: torch.dtype, change: Change) -> Tensor:
    """Send the part `rows` of a parameter to every rank: each owner its share of it."""
    mesh = tensor.device_mesh
    here = tuple(mesh.get_coordinate() or ())
    mine, local = local_box(tensor), tensor.to_local().detach()
    sizes = [stop - start for start, stop in rows]
    slab = torch.empty(sizes, dtype=dtype, device=mesh.device_type)
    for owner, box in _owners(tensor, here):
        part = overlap(box, rows)
        if part is None:
            continue
        target = slab[slices(part, rows)]
        values = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        if owner == here:
            values.copy_(change(part, local[slices(part, mine)].to(mesh.device_type)))
        _send_to_all(values, tensor, owner)
        if values is not target:
            target.copy_(values)
    return slab


def _send_to_all(values: Tensor, tensor: DTensor, owner: tuple[int, ...]) -> None:
    """Broadcast from the rank at `owner` along one axis, then along the next from all who have."""
    mesh = tensor.device_mesh
    here = tuple(mesh.get_coordinate() or ())
    axes = _sharded_axes(tensor)
    for number, axis in enumerate(axes):
        if any(here[later] != owner[later] for later in axes[number + 1 :]):
            continue
        source = (*here[:axis], owner[axis], *here[axis + 1 :])
        dist.broadcast(values, src=int(mesh.mesh[source]), group=mesh.get_group(axis))


def _sharded_axes(tensor: DTensor) -> list[int]:
    return [i for i, one in enumerate(tensor.placements) if not isinstance(one, Replicate)]


def _owners(tensor: DTensor, replica: tuple[int, ...]) -> list[tuple[tuple[int, ...], Box]]:
    """List who holds what of a parameter, in order, in the replica of the rank at `replica`."""
    mesh, sharded = tensor.device_mesh, _sharded_axes(tensor)
    places = [
        range(mesh.size(axis)) if axis in sharded else (replica[axis],) for axis in range(mesh.ndim)
    ]
    boxes = {at: box_at(tensor, at) for at in product(*places)}
    held = [item for item in boxes.items() if all(start < stop for start, stop in item[1])]
    return sorted(held, key=lambda item: item[1])


def gather_whole(tensor: DTensor) -> Tensor:
    """Gather a tensor onto every rank that holds a part of it."""
    # One mesh axis at a time: DTensor warns on every rank when it has to order several itself.
    for axis in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
