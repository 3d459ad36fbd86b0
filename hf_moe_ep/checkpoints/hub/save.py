"""Sharded parameters -> Hugging Face checkpoint in hub layout.

Rank 0 writes (`hub_write.py`) what it is sent: one tensor after the other, and of a tensor one
rank's part after the other. A part travels along one mesh axis at a time, by broadcast within that
axis. So no rank holds more than another rank's part of one tensor beyond its shards, and rank 0,
where parts are cut along dim 1, the experts of one ep rank. For a stacked weight on (ep_fsdp 2,
ep 2), ranks [[0, 1], [2, 3]]:

    experts   held by    along ep_fsdp   along ep
    first     rank 0     -               -
    second    rank 2     2 to 0          -
    third     rank 1     -               1 to 0
    fourth    rank 3     3 to 1          1 to 0

An all-gather would need memory for the whole tensor on every rank, and gloo's for two of them.

A model with adapters is saved as PEFT saves it: small, and whole on rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep.checkpoints.hub.configs import stage_configs
from hf_moe_ep.checkpoints.hub.pieces import box_at, describe, hub_pieces, slices
from hf_moe_ep.checkpoints.hub.write import (
    Source,
    first_dtype,
    parse_size,
    split_files,
    whole,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage.safetensors_file import Box
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.ranks.together import (
    check_alike,
    check_everyone_calls,
    is_distributed,
    is_first,
    on_first,
    together,
)
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.adapters import adapter_names, has_adapters
from hf_moe_ep.upstream.hub import file_name
from hf_moe_ep.upstream.module_names import canonical_name, unwrap

# Bytes of a tensor that is gathered in one collective, for speed: norms, routers.
_SMALL = 2**20


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    processor: Any = (),
    **kwargs: Any,
) -> None:
    """Write `model` so that stock `from_pretrained(directory)` loads it; every rank calls this.

    Beside its shards a rank needs memory for another rank's part of one tensor; rank 0, with
    expert_shard_dim=1, for one ep rank's experts of a layer. A process killed on the way leaves
    the checkpoint that was there.

    Args:
        model: patched, sharded or not.
        directory: created if missing; only rank 0 writes.
        max_shard_size: bytes of a file, or "5GB".
        dtype: None is the one that the model was loaded in; fp32 keeps the fp32 masters of a bf16
            model.
        processor: tokenizer or processor to save beside the model, or several.
        kwargs: of a model with adapters alone: passed to PEFT's `save_pretrained`.

    Raises:
        ValueError: a size that is none; on every rank, where ranks disagree about the arguments.
        RuntimeError: some rank has not called this within five minutes; on every rank, where rank
            0 cannot write: what was there stays.
    """
    check_everyone_calls("save_pretrained")
    folder, model = Path(directory), unwrap(model)
    others = processor if isinstance(processor, (list, tuple)) else [processor]
    if has_adapters(model):
        _save_adapters(model, folder, others, kwargs)
        return
    # These decide where ranks meet.
    check_alike("save_pretrained", max_shard_size=max_shard_size, dtype=dtype)
    if kwargs:
        raise TypeError(f"save_pretrained() got unexpected arguments: {', '.join(kwargs)}")
    state = find_state(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched; call its save_pretrained")
    sources = [
        _source(name, tensor, state, dtype or state.dtypes.get(name), partial(_slabs, tensor))
        for name, tensor in distinct_tensors(model).items()
    ]
    files = split_files(sources, parse_size(max_shard_size))

    def begin() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return stage_configs(model, folder, first_dtype(sources), others)

    configs = on_first(f"saving to {folder}", begin)
    write_checkpoint(folder, files, writes=is_first(), together=together, configs=configs)


def save_state_dict(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write tensors gathered before, as `save_pretrained` does; one process calls this.

    Raises:
        ValueError: tensors of the model are missing, or some are no part of it; nothing is written.
    """
    state = find_state(model)
    assert state is not None
    folder, names = Path(directory), distinct_tensors(model).keys()
    given = {canonical_name(name): tensor for name, tensor in state_dict.items()}
    tied = {canonical_name(name) for name in model.state_dict()}
    problems = [
        describe("missing", sorted(names - given.keys())),
        describe("unexpected", sorted(given.keys() - tied)),
    ]
    if any(problems):
        raise ValueError(
            f"state_dict is not that of this {type(model).__name__}: "
            f"{'; '.join(filter(None, problems))}"
        )
    sources = [
        _source(name, tensor, state, None, partial(whole, tensor))
        for name, tensor in given.items()
        if name in names
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files = split_files(sources, parse_size(max_shard_size))
    configs = stage_configs(model, folder, first_dtype(sources), ())
    write_checkpoint(folder, files, configs=configs)


@torch.no_grad()
def gather_state_dict(
    model: nn.Module, save_embedding_layers: str | bool = "auto"
) -> dict[str, Tensor]:
    """Full tensors on the host of rank 0, empty elsewhere; every rank calls this.

    Of a model with adapters what PEFT saves, packed as PEFT packs it: the base stays where it is.
    `save_embedding_layers` as in PEFT's save_pretrained.
    """
    keep = is_first()
    full: dict[str, Tensor] = {}
    model = unwrap(model)
    state_dict = model.state_dict()
    names = adapter_names(model, state_dict, save_embedding_layers) if keep else None
    if is_distributed():
        # Rank 0 decides: PEFT looks into files that others may not have.
        decision = [names]
        dist.broadcast_object_list(decision, src=0)
        names = decision[0]
    for name in state_dict if names is None else names:
        tensor = state_dict[name]
        gathered = gather_whole(tensor) if isinstance(tensor, DTensor) else tensor
        if keep:
            full[canonical_name(name)] = gathered.detach().cpu()
    return pack_factors(model, full)


def _save_adapters(model: Any, folder: Path, others: Iterable[Any], kwargs: dict[str, Any]) -> None:
    state_dict = gather_state_dict(model, kwargs.get("save_embedding_layers", "auto"))

    def write() -> None:
        model.save_pretrained(os.fspath(folder), state_dict=state_dict, **kwargs)
        for other in others:
            other.save_pretrained(folder)

    on_first(f"saving to {folder}", write)


def distinct_tensors(model: Any) -> dict[str, Tensor]:
    """All that a checkpoint holds, by canonical name; tied weights once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (canonical_name(name), tensor))
    return dict(found.values())


def _source(
    name: str,
    tensor: Tensor,
    state: ModelState,
    dtype: torch.dtype | None,
    slabs: Callable[[], Iterable[tuple[Box, Tensor | None]]],
) -> Source:
    pieces = hub_pieces(file_name(name), tuple(tensor.shape), state.plan)
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Source(pieces, kept, slabs)


@torch.no_grad()
def _slabs(tensor: Tensor) -> Iterator[tuple[Box, Tensor | None]]:
    """The values of a parameter for rank 0, on its host; every rank runs this to the end."""
    if not isinstance(tensor, DTensor):
        yield from whole(tensor.detach().cpu())
        return
    if tensor.numel() * tensor.element_size() <= _SMALL:
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
    """What each rank holds of a parameter, in order, with its values on rank 0."""
    mesh = tensor.device_mesh
    here = tuple(mesh.get_coordinate() or ())
    # Parameters that FSDP2 offloads are on the host, their groups are not.
    mine = tensor.to_local().detach().contiguous().to(mesh.device_type)
    sharded = [i for i, one in enumerate(tensor.placements) if not isinstance(one, Replicate)]
    sizes = [mesh.size(axis) if axis in sharded else 1 for axis in range(mesh.ndim)]
    boxes = {at: box_at(tensor, at) for at in product(*map(range, sizes))}
    for owner, box in sorted(boxes.items(), key=lambda item: item[1]):
        shape = [stop - start for start, stop in box]
        if 0 in shape:
            continue
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


def gather_whole(tensor: DTensor) -> Tensor:
    # One mesh axis at a time: DTensor warns on every rank when it has to order several itself.
    for axis in range(tensor.device_mesh.ndim):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
