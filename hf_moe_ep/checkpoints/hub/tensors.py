"""Yield a model's weights as the hub stores them, one tensor after the other, on every rank.

An inference engine that receives the weights of a training run needs the keys of a checkpoint,
whole tensors, and no second copy of the model. `save.py` sends the same tensors to rank 0, which
writes them to disk; `hub_tensors` yields them on every rank. For Qwen3-MoE on 4 ranks, each rank
receives

    model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, ..,
    model.layers.0.mlp.experts.0.gate_proj.weight, model.layers.0.mlp.experts.0.up_proj.weight, ..

A slab is a few rows of a parameter. Slabs are gathered one after the other, and each checkpoint
tensor is yielded as soon as the slabs have filled it. Before each slab the ranks check that all of
them still iterate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.gather import gather_changed, slabs_for_all
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors
from hf_moe_ep.checkpoints.hub.pieces import cut_pieces
from hf_moe_ep.checkpoints.hub.whole_weights import check_whole_weights
from hf_moe_ep.checkpoints.hub.write import TensorGroup, group_tensors, saved_dtype
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

# max_bytes // _SLABS is the size of a slab. A rank needs memory for a slab that the caller still
# holds and for a slab that is being filled. The rank that owns a shard also needs memory for the
# shard in the dtype of the master weights, the product of the adapter's factors, and the sum of
# shard and product; each is up to twice as large as the sent values. An all-gather needs two slabs
# besides its result.
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

    Keys, values and dtypes are those that `save_pretrained` writes. The order is layer by layer;
    tied weights are yielded once. Each tensor is a contiguous copy on the device on which the model
    computes. The model does not change.

    All ranks must iterate to the end and in step, because each tensor is gathered from all ranks.
    Do not run the model or move its experts during the iteration. If a rank stops early (`break`,
    `close()`, an error that is handled), the other ranks raise a RuntimeError that names this rank
    at their next tensor; if all ranks stop, no rank raises. If you store a caught exception
    (`last = error`), its traceback keeps the local variables of the loop's function alive, so the
    iterator is not closed and the other ranks wait. To avoid this, write the loop inside
    `with contextlib.closing(tensors):`. An unhandled error ends the process, and torchrun then ends
    the other ranks.

    Args:
        model: patched, sharded or not, with adapters or not.
        merge_adapters: add LoRA, on experts and other modules, to the yielded tensors, as PEFT's
            `merge_adapter` adds it to the model: all active adapters are added with their scales,
            and modules_to_save replace the originals. Keys are those of a model without adapters.
        dtype: the dtype of the tensors; None yields the dtype in which the model was loaded, as
            `save_pretrained` does.
        max_bytes: the limit of the memory needed besides the shards, including the tensor that was
            yielded last. A single tensor that is larger is yielded all the same (the embedding, or
            all experts of a layer if the hub stores them in one tensor); it is assembled from small
            slabs. In addition each rank holds the whole factors of one parameter's adapters.

    Raises:
        ValueError: the model is not patched or is on the meta device; it has adapters and
            `merge_adapters` is False, or adapters that cannot be merged or are disabled; its
            experts are held quantised; ranks pass different arguments (raised on every rank).
        RuntimeError: a rank has not begun to iterate within five minutes, or has stopped early;
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
            "this model has adapters, which are not part of its own weights; pass "
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
    # Inference mode is off here, because a sharded model has no state dict in inference mode.
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
    placements = [layer.placement for layer in state.moe_layers]
    try:
        for group in _describe_groups(model, state, dtype, max_bytes // _SLABS):
            for key_and_tensor in _assemble(group, still_here):
                yield key_and_tensor
                _check_not_moved(placements, state)
    except GeneratorExit:
        if still_here is not None:
            still_here.leave()
        raise
    if still_here is not None:
        still_here.end()


def _check_not_moved(before: list[Tensor | None], state: ModelState) -> None:
    """Raise RuntimeError if experts were moved: the next keys would name the wrong experts."""
    layers = zip(state.moe_layers, before, strict=True)
    if any(layer.placement is not placement for layer, placement in layers):
        raise RuntimeError(
            "balance_experts has moved experts while hub_tensors sent them; call it after the last "
            "tensor"
        )


def _describe_groups(
    model: nn.Module, state: ModelState, dtype: torch.dtype | None, max_bytes: int
) -> list[TensorGroup]:
    """Describe every tensor of a checkpoint, with slabs that every rank receives."""
    # The tensors are listed before any all-gather: while FSDP2 has gathered the parameters of a
    # layer, its modules hold other tensors.
    tensors = distinct_tensors(model, left_out_by_merging(model))
    updates = updates_of(model, tensors.values())
    # For each stacked tensor: the row (slot) in which each expert is stored.
    slots = placement_by_tensor(model)
    dtypes = {file_name(name): loaded for name, loaded in state.dtypes.items()}

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return saved_dtype(tensor, dtype or dtypes.get(file_name(name)))

    def slabs_of(name: str, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        tensor_updates, slots_E = updates.get(id(tensor), []), slots.get(id(tensor))
        return _gather_slabs(tensor, dtype_of(name, tensor), tensor_updates, max_bytes, slots_E)

    return group_tensors(model, state.plan, tensors, dtype_of, slabs_of)


def _gather_slabs(
    tensor: Tensor,
    dtype: torch.dtype,
    updates: Sequence[LowRank],
    max_bytes: int,
    slots_E: Tensor | None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield the merged values of a parameter in `dtype`, cut along dim 0, on every rank."""
    change = partial(_merge_and_cast, dtype, [_gather_factors(update) for update in updates])
    return slabs_for_all(tensor, dtype, change, max_bytes, slots_E)


@torch.no_grad()
def _gather_factors(update: LowRank) -> Update:
    a, b = gather_changed(update.a, _unchanged), gather_changed(update.b, _unchanged)
    if update.num_experts:
        a, b = with_experts_in_front(a, b, update.num_experts)
    return Update(a, b, update.scale, update.turned, update.casts)


def _unchanged(box: Box, values: Tensor) -> Tensor:
    return values


def _merge_and_cast(dtype: torch.dtype, updates: list[Update], box: Box, values: Tensor) -> Tensor:
    """Return a copy of the values in a box of a parameter, merged and cast as a save would."""
    if updates:
        rows = tuple(slice(start, stop) for start, stop in box)
        values = add_updates(values.clone(), rows, updates)
    return values.to(dtype, copy=not updates)


def _assemble(group: TensorGroup, still_here: StillHere | None) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint tensors in order, each as soon as the slabs have filled it."""
    slabs, shapes = group.slabs(), group.shapes
    num_missing = {key: math.prod(shape) for key, shape in shapes.items()}
    unfinished: dict[str, Tensor] = {}
    while num_missing:
        if still_here is not None:
            still_here.check()
        pieces, box, slab = next(slabs)
        assert slab is not None
        for key, parts in cut_pieces(pieces, box).items():
            shape = shapes[key]
            for part in parts:
                values = part.in_view(slab[part.slices_in(box)])
                num_missing[key] -= values.numel()
                if values.numel() == math.prod(shape):
                    unfinished[key] = values.reshape(shape).contiguous()
                    continue
                if key not in unfinished:
                    unfinished[key] = slab.new_empty(shape)
                filled = tuple(slice(start, stop) for start, stop in part.box_in_view)
                unfinished[key].view(part.view)[filled] = values
                del values
            if num_missing[key] == 0:
                del num_missing[key]
                yield key, unfinished.pop(key)
        del slab
