"""`balance_experts`: move experts to where the load of an ep group's ranks is most even.

Experts that are busy come to lie beside idle ones, layer by layer, and a rank keeps as many as
before. The model computes what it did: tokens are sent to where their experts are now, and what
else is known of an expert (its number in routers, counts, replays, files) stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.placement.assign import balanced, busiest
from hf_moe_ep.placement.hub_order import guard_state_dicts
from hf_moe_ep.placement.move import (
    ExpertTensors,
    check_movable,
    check_same_company,
    check_trained,
    find_expert_tensors,
    move_experts,
    slots_of,
)
from hf_moe_ep.ranks.together import ALONE, check_alike, check_everyone_calls, together
from hf_moe_ep.routing.load import ExpertLoad, slots_of_layers
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, patched_state
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import holds_unreduced_grads


def balance_experts(
    model: nn.Module, optimizer: Any, load: ExpertLoad, *, threshold: float = 1.0
) -> ExpertLoad:
    """Move experts between the ranks of an ep group until their loads are even; every rank calls.

        optimizer.step()
        if step % 500 == 0:
            balance_experts(model, optimizer, expert_load(model))

    Call it between two steps. Weights, biases, adapters, what is held quantised, gradients and what
    the optimizer keeps move from the rank that has them to the one that will, tensor by tensor;
    results change by the order of sums alone. Whatever is saved stays in hub order, and is what it
    would have been; what is loaded comes to lie as experts do then. Code of your own that pairs
    this model's shards with a copy's, as an average of weights does, has to balance that by the
    same load, or to work within `experts_in_hub_order`.

    Args:
        model: patched and sharded, with ep_size > 1.
        optimizer: of its parameters, or several in a list; None where none has been made yet.
        load: of `expert_load`, the same on every rank: what is taken for the load to come.
        threshold: layers whose busiest rank has at most this many times the mean are left alone.

    Returns:
        The same counts, and where experts lie now: its `rank_max_over_mean` is what was reached.

    Raises:
        ValueError: on every rank, before anything moves: a model without ep, or the load of
            another one; other counts on another rank, or another optimizer; an optimizer of other
            parameters, or with state that cannot be cut by experts; a step that is half done.
        RuntimeError: some rank has not called this within five minutes.
    """
    model = unwrap(model)
    state = patched_state(model)
    check_has_ep(state, "balance_experts")
    check_everyone_calls("balance_experts", alone=ALONE)
    optimizers = together("balance_experts", lambda: _listed(optimizer))
    reshard(model)

    def check() -> list[ExpertTensors]:
        _check_load(load, state)
        _check_threshold(threshold)
        _check_between_steps(model)
        tensors = find_expert_tensors(model)
        check_trained(tensors, optimizers)
        check_movable(tensors, optimizers)
        return tensors

    tensors = together("balance_experts", check)
    check_alike("balance_experts", threshold=threshold, load=_digest(load))
    check_same_company("balance_experts", tensors, optimizers)
    guard_state_dicts(model, state, tensors, optimizers)
    assert state.meshes is not None
    ranks = state.meshes.ep_size
    for one in tensors:
        now_E = slots_of(one.layer.placement, state.num_experts)
        load_E: list[int] = load.counts[one.layer.index].tolist()
        if not _is_uneven(load_E, now_E, ranks, threshold):
            continue
        slots_E = balanced(load_E, ranks, now_E)
        after = None if slots_E == sorted(slots_E) else torch.tensor(slots_E, device=state.device)
        move_experts(one, after, state.meshes, optimizers)
    return replace(load, ep_size=ranks, slots=slots_of_layers(state))


def check_has_ep(state: ModelState, what: str) -> None:
    """Raise where there are no other ranks for experts to go to."""
    if state.meshes is None or state.meshes.ep_size == 1:
        sharded = "is not sharded" if state.meshes is None else "has ep_size (1)"
        raise ValueError(
            f"{what} moves experts between the ranks of an ep group, and this model {sharded}: "
            f"patch it with ep_size=2 or more, shard it, and balance it then"
        )


def _listed(optimizer: Any) -> Sequence[Any]:
    if optimizer is None:
        return []
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in given:
        if not hasattr(one, "param_groups"):
            raise ValueError(
                f"optimizer is a {type(one).__name__}, which has no parameters; pass the optimizer "
                f"of the model, several in a list, or None where none has been made yet"
            )
    return given


def _digest(load: ExpertLoad) -> str:
    return hashlib.sha256(repr(load.counts.tolist()).encode()).hexdigest()[:12]


def _check_threshold(threshold: float) -> None:
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not (number and threshold >= 1):
        raise ValueError(
            f"threshold is what the busiest rank may have over the mean of all, so 1 or more, got "
            f"{threshold!r}; try 1.2"
        )


def _check_load(load: ExpertLoad, state: ModelState) -> None:
    if not isinstance(load, ExpertLoad):
        raise ValueError(f"load is a {type(load).__name__}; pass expert_load(model)")
    wanted = (len(state.moe_layers), state.num_experts)
    if tuple(load.counts.shape) != wanted:
        raise ValueError(
            f"load is of {load.counts.shape[0]} layers of {load.counts.shape[1]} experts and this "
            f"model has {wanted[0]} of {wanted[1]}; pass expert_load(model)"
        )


def _check_between_steps(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule) and holds_unreduced_grads(module):
            raise ValueError(
                "balance_experts was called while gradients of micro-batches wait for the last "
                "one of their step, of experts by where they lie now; call it behind "
                "optimizer.step()"
            )


def _is_uneven(load_E: list[int], slots_E: list[int], ranks: int, threshold: float) -> bool:
    local = len(load_E) // ranks
    most = busiest(load_E, [slot // local for slot in slots_E], ranks)
    return most * ranks > threshold * sum(load_E)
