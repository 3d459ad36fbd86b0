"""`balance_experts`: move experts between the ranks of an ep group so that their loads are even.

The ranks of an ep group share the experts of each layer. Busy experts are placed on a rank together
with idle experts, and the number of experts per rank does not change. The model computes the same
results, because tokens are sent to the present ranks of their experts. Routers, counts, replays and
files still number the experts as the hub does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.placement.assign import assign_slots, compute_largest_load
from hf_moe_ep.placement.hub_order import guard_state_dicts
from hf_moe_ep.placement.move import (
    ExpertTensors,
    check_movable,
    check_same_tensors,
    check_trained,
    find_expert_tensors,
    list_slots_of_experts,
    move_layers,
)
from hf_moe_ep.ranks.all_ranks import (
    PATIENCE_OF_RANK_0,
    check_alike,
    check_everyone_calls,
    run_on_all,
)
from hf_moe_ep.routing.load import ExpertLoad, list_slots
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, patched_state
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import holds_unreduced_grads


def balance_experts(
    model: nn.Module, optimizer: Any, load: ExpertLoad, *, threshold: float = 1.0
) -> ExpertLoad:
    """Move experts between the ranks of an ep group to balance their loads; every rank calls this.

        optimizer.step()
        if step % 500 == 0:
            balance_experts(model, optimizer, expert_load(model))

    With pipeline stages each stage moves the experts of its own layers.

    Call this function between two steps. The weights (also quantised weights), biases, adapters,
    gradients and optimizer state of the moved experts are sent to their new ranks, tensor by
    tensor. Results change only in rounding, because sums have another order. Files are saved in hub
    order (row e of a stacked tensor is expert e), as if no expert had moved, and loading sends
    values to the present ranks of their experts. If your own code combines the shards of this model
    with the shards of a copy, for example in an average of weights, then balance the copy by the
    same load, or run that code inside `experts_in_hub_order`.

    Args:
        model: patched and sharded, with ep_size > 1.
        optimizer: the optimizer of the model's parameters, or a list of optimizers; None if no
            optimizer has been created yet.
        load: a result of `expert_load`, equal on every rank, as an estimate of the future load.
        threshold: a layer is not changed if the load of its busiest rank is at most `threshold`
            times the mean load of the ranks.

    Returns:
        `load` with the new slots of the experts. Its `rank_max_over_mean` shows how even the loads
        of the ranks are with these slots.

    Raises:
        ValueError: on every rank, before anything is moved: the model has no ep group of several
            ranks, or two of its layers share experts; an argument is invalid, or `load` belongs to
            another model; counts, thresholds or optimizers differ between ranks; a trained
            parameter of experts is in no optimizer; an optimizer has state that cannot be divided
            by experts; gradients of an unfinished step are not reduced yet.
        RuntimeError: a rank has not called this function within five minutes, or only rank 0 has
            called it within 20 seconds.
    """
    model = unwrap(model)
    state = patched_state(model)
    check_has_ep(state, "balance_experts")
    check_everyone_calls("balance_experts", patience_of_rank_0=PATIENCE_OF_RANK_0)
    optimizers = run_on_all("balance_experts", lambda: _list_optimizers(optimizer))
    reshard(model)

    def check() -> list[ExpertTensors]:
        _check_load(load, state)
        _check_threshold(threshold)
        _check_between_steps(model)
        tensors = find_expert_tensors(model)
        check_trained(tensors, optimizers)
        check_movable(tensors, optimizers)
        return tensors

    tensors = run_on_all("balance_experts", check)
    check_alike("balance_experts", threshold=threshold, load=_hash_counts(load))
    assert state.meshes is not None
    run_on_all(
        "balance_experts",
        partial(check_same_tensors, "balance_experts", tensors, optimizers, state.meshes),
    )
    guard_state_dicts(model, state, tensors, optimizers)
    ranks = state.meshes.ep_size
    slots_of_layers = [layer.slots_E for layer in state.moe_layers]
    for layer in state.moe_layers:
        old_slots_E = list_slots_of_experts(layer.slots_E, state.num_experts)
        load_E: list[int] = load.counts[layer.index].tolist()
        if not _is_uneven(load_E, old_slots_E, ranks, threshold):
            continue
        slots_E = assign_slots(load_E, ranks, old_slots_E)
        in_hub_order = slots_E == sorted(slots_E)
        slots_of_layers[layer.index] = (
            None if in_hub_order else torch.tensor(slots_E, device=state.mesh_device)
        )
    move_layers(tensors, slots_of_layers, state, optimizers)
    return replace(load, ep_size=ranks, slots=list_slots(state))


def check_has_ep(state: ModelState, what: str) -> None:
    """Raise ValueError if there is no ep group of several ranks, or if layers share experts."""
    if state.meshes is None or state.meshes.ep_size == 1:
        sharded = "is not sharded" if state.meshes is None else "has ep_size (1)"
        raise ValueError(
            f"{what} moves experts between the ranks of an ep group, but this model {sharded}: "
            f"first patch the model with ep_size=2 or more and shard it"
        )
    if state.plan.tied_layers:
        raise ValueError(
            f"{what} moves experts according to the load of their layer, but in "
            f"{state.plan.model_type} two layers with loads of their own share the same experts"
        )


def _list_optimizers(optimizer: Any) -> Sequence[Any]:
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for item in optimizers:
        if not hasattr(item, "param_groups"):
            raise ValueError(
                f"optimizer is a {type(item).__name__}, which has no parameters; pass the model's "
                f"optimizer, a list of its optimizers, or None before an optimizer is created"
            )
    return optimizers


def _hash_counts(load: ExpertLoad) -> str:
    return hashlib.sha256(repr(load.counts.tolist()).encode()).hexdigest()[:12]


def _check_threshold(threshold: float) -> None:
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not (is_number and threshold >= 1):
        raise ValueError(
            f"threshold is the load of the busiest rank / the mean load of the ranks, so 1 or "
            f"more, got {threshold!r}; try 1.2"
        )


def _check_load(load: ExpertLoad, state: ModelState) -> None:
    if not isinstance(load, ExpertLoad):
        raise ValueError(f"load is a {type(load).__name__}; pass expert_load(model)")
    expected = (len(state.moe_layers), state.num_experts)
    if tuple(load.counts.shape) != expected:
        raise ValueError(
            f"load has {load.counts.shape[0]} layers of {load.counts.shape[1]} experts, and this "
            f"model has {expected[0]} of {expected[1]}; pass expert_load(model)"
        )


def _check_between_steps(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule) and holds_unreduced_grads(module):
            raise ValueError(
                "balance_experts was called during gradient accumulation: gradients that FSDP2 has "
                "not reduced yet cannot move with the experts; call it after optimizer.step()"
            )


def _is_uneven(load_E: list[int], slots_E: list[int], ranks: int, threshold: float) -> bool:
    local = len(load_E) // ranks
    largest = compute_largest_load(load_E, [slot // local for slot in slots_E], ranks)
    return largest * ranks > threshold * sum(load_E)
