"""Sharded parameters -> Hugging Face checkpoint in hub layout.

Tensors are gathered one after the other, every rank taking part, and written by rank 0
(`hub_write.py`). A stacked weight comes in slabs, the experts of one ep rank each: first gathered
over ep_fsdp by everyone, then broadcast in rank 0's ep group. So no rank holds more than one dense
tensor or the experts of two ep ranks beyond its shards.

A model with adapters is saved as PEFT saves it: small, and whole on rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from hf_moe_ep import hf, hf_hub
from hf_moe_ep.factors import pack_factors
from hf_moe_ep.hub_layout import hub_pieces
from hf_moe_ep.hub_write import (
    Source,
    first_dtype,
    parse_size,
    split_files,
    whole,
    write_checkpoint,
)
from hf_moe_ep.meet import check_everyone_calls, is_distributed, is_first, together
from hf_moe_ep.safetensors_file import Box
from hf_moe_ep.state import ModelState, find_state


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

    Beside its shards a rank needs memory for the experts of two ep ranks in one layer. A process
    killed on the way leaves the checkpoint that was there.

    Args:
        model: patched, sharded or not.
        directory: created if missing; only rank 0 writes.
        max_shard_size: bytes of a file, or "5GB".
        dtype: None is the one that the model was loaded in; fp32 keeps the fp32 masters of a bf16
            model.
        processor: tokenizer or processor to save beside the model, or several.
        kwargs: of a model with adapters alone: passed to PEFT's `save_pretrained`.

    Raises:
        RuntimeError: some rank has not called this within five minutes; on every rank, where rank
            0 cannot write: what was there stays.
    """
    check_everyone_calls("save_pretrained")
    folder, model = Path(directory), hf.unwrap(model)
    others = processor if isinstance(processor, (list, tuple)) else [processor]
    if hf.has_adapters(model):
        _save_adapters(model, folder, others, kwargs)
        return
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

    def begin() -> None:
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            hf_hub.save_configs(model, folder, first_dtype(sources), others)

    together(f"saving to {folder}", begin)
    write_checkpoint(folder, files, writes=is_first(), together=together)


def save_state_dict(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write tensors gathered before, as `save_pretrained` does; one process calls this."""
    state = find_state(model)
    assert state is not None
    folder, names = Path(directory), distinct_tensors(model).keys()
    given = {hf.canonical_name(name): tensor for name, tensor in state_dict.items()}
    sources = [
        _source(name, tensor, state, None, partial(whole, tensor))
        for name, tensor in given.items()
        if name in names
    ]
    folder.mkdir(parents=True, exist_ok=True)
    hf_hub.save_configs(model, folder, first_dtype(sources), ())
    write_checkpoint(folder, split_files(sources, parse_size(max_shard_size)))


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
    model = hf.unwrap(model)
    state_dict = model.state_dict()
    names = hf.adapter_names(model, state_dict, save_embedding_layers) if keep else None
    if is_distributed():
        # Rank 0 decides: PEFT looks into files that others may not have.
        decision = [names]
        dist.broadcast_object_list(decision, src=0)
        names = decision[0]
    for name in state_dict if names is None else names:
        tensor = state_dict[name]
        gathered = _whole(tensor) if isinstance(tensor, DTensor) else tensor
        if keep:
            full[hf.canonical_name(name)] = gathered.detach().cpu()
    return pack_factors(model, full)


def _save_adapters(model: Any, folder: Path, others: Iterable[Any], kwargs: dict[str, Any]) -> None:
    state_dict = gather_state_dict(model, kwargs.get("save_embedding_layers", "auto"))

    def write() -> None:
        if is_first():
            model.save_pretrained(os.fspath(folder), state_dict=state_dict, **kwargs)
            for other in others:
                other.save_pretrained(folder)

    together(f"saving to {folder}", write)


def distinct_tensors(model: Any) -> dict[str, Tensor]:
    """All that a checkpoint holds, by canonical name; tied weights once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (hf.canonical_name(name), tensor))
    return dict(found.values())


def _source(
    name: str,
    tensor: Tensor,
    state: ModelState,
    dtype: torch.dtype | None,
    slabs: Callable[[], Iterable[tuple[Box, Tensor | None]]],
) -> Source:
    pieces = hub_pieces(hf_hub.file_name(name), tuple(tensor.shape), state.plan)
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Source(pieces, kept, slabs)


@torch.no_grad()
def _slabs(tensor: Tensor) -> Iterator[tuple[Box, Tensor | None]]:
    """The values of a parameter for rank 0, on its host; every rank runs this to the end."""
    if not isinstance(tensor, DTensor):
        yield from whole(tensor.detach().cpu())
        return
    names = tensor.device_mesh.mesh_dim_names or ()
    if "ep" not in names:
        gathered = _whole(tensor)
        yield from whole(gathered.detach().cpu()) if is_first() else ()
        return
    axis = names.index("ep")
    group = tensor.device_mesh.get_group(axis)
    mine = _whole(tensor, but=axis)
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return
    for number, source in enumerate(ranks):
        slab = mine.contiguous() if source == dist.get_rank() else torch.empty_like(mine)
        dist.broadcast(slab, src=source, group=group)
        experts = (number * mine.shape[0], (number + 1) * mine.shape[0])
        box = (experts, *((0, size) for size in mine.shape[1:]))
        yield box, slab.cpu() if is_first() else None


def _whole(tensor: DTensor, but: int | None = None) -> Tensor:
    """Gathered over every mesh axis, `but` one."""
    # One mesh axis at a time: DTensor warns on every rank when it has to order several itself.
    for axis in range(tensor.device_mesh.ndim):
        if axis == but:
            continue
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
