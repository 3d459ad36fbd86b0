"""A model's weights as the hub has them, one tensor after the other, on every rank.

What an engine that generates wants: the keys of a checkpoint, whole tensors, and no second copy of
the model. `save.py` writes the same pieces of the same parameters; there parts go to rank 0 and to
its disk, here to all. Of Qwen3-MoE on 4 ranks every rank is given

    model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, ..,
    model.layers.0.mlp.experts.0.gate_proj.weight, model.layers.0.mlp.experts.0.up_proj.weight, ..

A slab, some rows of a parameter, is gathered; the pieces that lie in it are yielded; a piece that
does not fit into one slab is put together from several. Before each slab ranks tell each other
whether all of them still iterate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.gather import gather_changed, slabs_for_all
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors
from hf_moe_ep.checkpoints.hub.pieces import overlaps
from hf_moe_ep.checkpoints.hub.whole_weights import check_whole_weights
from hf_moe_ep.checkpoints.hub.write import Source, saved_dtype, sources_of
from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.lora.merged import Update, add_updates, with_experts_in_front
from hf_moe_ep.placement.hub_order import placement_by_tensor
from hf_moe_ep.ranks.together import StillHere, check_alike, check_everyone_calls
from hf_moe_ep.state import ModelState, patched_state
from hf_moe_ep.upstream.adapters import (
    LowRank,
    active_adapters,
    adapter_layers,
    check_mergeable,
    left_out_by_merging,
    updates_of,
)
from hf_moe_ep.upstream.hub import file_name
from hf_moe_ep.upstream.module_names import unwrap

# Of max_bytes, to one slab: one that the caller still holds, one that is being made, and on its
# owner the part in the dtype of the masters, the adapter's product and their sum, each up to twice
# as large as what is sent; an all-gather needs two besides its result.
_SLABS = 8


def hub_tensors(
    model: nn.Module,
    *,
    merge_adapters: bool = False,
    dtype: torch.dtype | None = None,
    max_bytes: int = 2**30,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (hub key, full tensor) of a patched model, the same on every rank.

        for key, tensor in hub_tensors(model):
            engine.load_weights([(key, tensor)])

    Keys, values and dtypes are those that `save_pretrained` writes, tied weights once and layer by
    layer; tensors are contiguous copies, on the device that the model computes on, and never the
    model's own memory. Nothing of the model changes.

    Every rank has to iterate, to the end, and in step: each tensor is gathered from all of them.
    Do not run the model in between, nor move its experts. Where a rank stops early (`break`,
    `close()`, an error that is handled) the others get a RuntimeError that names it with their next
    tensor; if all stop, all do. An error that is kept (`last = error`) keeps an iterator that a
    variable holds, and the others wait: write the loop into `with contextlib.closing(tensors):`. An
    error that nobody handles ends the process, and with it the others.

    Args:
        model: patched, sharded or not, with adapters or not.
        merge_adapters: add LoRA, on experts and other modules, to what is sent, as PEFT's
            `merge_adapter` would to the model: all active adapters, by their own scales, and
            modules_to_save in place of the originals. Names are those of a model without adapters.
        dtype: None is the one that the model was loaded in, as in `save_pretrained`.
        max_bytes: how much may be alive beyond the shards, the last tensor that was yielded
            included. A single tensor that is larger comes all the same, by itself (the embedding;
            where the hub has all experts of a layer in one tensor, that); the slabs that it is made
            of are small. Besides it, factors of one parameter's adapters are on each rank whole.

    Raises:
        ValueError: the model is not patched, has no values, has adapters that are not merged, or
            some that cannot be, or are switched off, or experts that are held quantised; on every
            rank, where ranks disagree about the arguments.
        RuntimeError: some rank has not begun to iterate within five minutes, or has stopped early;
            `balance_experts` has moved experts since the first tensor.
    """
    model = unwrap(model)
    state = patched_state(model)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ValueError(f"max_bytes {max_bytes!r} is no number of bytes; try 2**30")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is no floating point dtype; try torch.bfloat16")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("this model is on the meta device, without values to send; load it first")
    check_whole_weights(model, "hub_tensors")
    if merge_adapters:
        check_mergeable(model)
    elif any(True for _ in adapter_layers(model)):
        raise ValueError(
            "this model has adapters, and its weights alone are not what it computes; pass "
            "merge_adapters=True, or save the adapters with save_pretrained(model, directory)"
        )
    return _iterate(model, state, merge_adapters, dtype, max_bytes)


@torch.inference_mode(False)
def _iterate(
    model: nn.Module,
    state: ModelState,
    merge_adapters: bool,
    dtype: torch.dtype | None,
    max_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    # Also for a caller in inference mode, in which a sharded model gives no state dict.
    still_here = None
    if state.meshes is not None:
        check_everyone_calls("hub_tensors")
        check_alike(
            "hub_tensors",
            model=f"{type(model).__name__} of {sum(p.numel() for p in model.parameters())} values",
            merge_adapters=merge_adapters,
            active_adapters=active_adapters(model),
            dtype=dtype,
            max_bytes=max_bytes,
        )
        still_here = StillHere("hub_tensors", state.device)
    lie = [layer.placement for layer in state.moe_layers]
    try:
        for source in _sources(model, state, dtype, max_bytes // _SLABS):
            for named in _tensors_of(source, still_here):
                yield named
                _check_unmoved(lie, state)
    except GeneratorExit:
        if still_here is not None:
            still_here.leave()
        raise
    if still_here is not None:
        still_here.end()


def _check_unmoved(before: list[Tensor | None], state: ModelState) -> None:
    """Raise where what is sent of experts would no longer be theirs; all ranks move them."""
    if any(layer.placement is not lie for layer, lie in zip(state.moe_layers, before, strict=True)):
        raise RuntimeError(
            "balance_experts has moved experts while hub_tensors sent them; iterate to the end, "
            "and move them behind that"
        )


def _sources(
    model: nn.Module, state: ModelState, dtype: torch.dtype | None, max_bytes: int
) -> list[Source]:
    """Describe every tensor of a checkpoint, with slabs that go to all ranks."""
    # First: while units are gathered, modules hold other tensors than a state dict.
    tensors = distinct_tensors(model, left_out_by_merging(model))
    updates = updates_of(model, tensors.values())
    slots = placement_by_tensor(model)
    dtypes = {file_name(name): kept for name, kept in state.dtypes.items()}

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return saved_dtype(tensor, dtype or dtypes.get(file_name(name)))

    def slabs_of(name: str, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        of_tensor = updates.get(id(tensor), [])
        lie = slots.get(id(tensor))
        return _slabs(tensor, dtype_of(name, tensor), of_tensor, max_bytes, lie)

    return sources_of(model, state.plan, tensors, dtype_of, slabs_of)


def _slabs(
    tensor: Tensor,
    dtype: torch.dtype,
    updates: Sequence[LowRank],
    max_bytes: int,
    slots: Tensor | None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the values of a parameter, adapters merged, cast, cut along dim 0, on every rank."""
    change = partial(_to_be_sent, dtype, [_gathered(update) for update in updates])
    return slabs_for_all(tensor, dtype, change, max_bytes, slots)


@torch.no_grad()
def _gathered(update: LowRank) -> Update:
    a, b = gather_changed(update.a, _as_it_is), gather_changed(update.b, _as_it_is)
    if update.num_experts:
        a, b = with_experts_in_front(a, b, update.num_experts)
    return Update(a, b, update.scale, update.turned, update.casts)


def _as_it_is(part: Box, values: Tensor) -> Tensor:
    return values


def _to_be_sent(dtype: torch.dtype, updates: list[Update], part: Box, values: Tensor) -> Tensor:
    """Make of a part of a parameter what a checkpoint has of it; a copy."""
    if updates:
        rows = tuple(slice(start, stop) for start, stop in part)
        values = add_updates(values.clone(), rows, updates)
    return values.to(dtype, copy=not updates)


def _tensors_of(source: Source, still_here: StillHere | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, in order, as slabs of parameters complete them."""
    slabs = ((member, *item) for member in source.members for item in member.slabs())
    missing = {key: math.prod(shape) for key, shape in source.tensors.items()}
    unfinished: dict[str, Tensor] = {}
    while missing:
        if still_here is not None:
            still_here.check()
        member, box, slab = next(slabs)
        assert slab is not None
        for parts in overlaps(member.pieces, box):
            key, shape = parts.key, source.tensors[parts.key]
            for piece, part in parts.parts:
                values = piece.in_view(slab[part.slices])
                missing[key] -= values.numel()
                if values.numel() == math.prod(shape):
                    unfinished[key] = values.reshape(shape).contiguous()
                    continue
                if key not in unfinished:
                    unfinished[key] = slab.new_empty(shape)
                inside = tuple(slice(start, stop) for start, stop in part.in_file)
                unfinished[key].view(piece.view)[inside] = values
                del values
            if missing[key] == 0:
                del missing[key]
                yield key, unfinished.pop(key)
        del slab
