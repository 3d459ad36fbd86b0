"""Restore hub order temporarily, for code that saves or loads experts.

In hub order, row e of a stacked tensor is expert e. Files, state dicts and other models need this
order. `balance_experts` moves experts to other rows, which are called slots; a model whose experts
have moved is called balanced. `experts_in_hub_order` moves the experts of a balanced model back for
the code in its block, which saves or loads experts:

    with experts_in_hub_order(model, optimizer):
        ...                                 row e of a stacked tensor is expert e

Files of a balanced model are equal to files of a model that was never balanced. The block sends the
bytes of the moved experts twice, but needs no second copy of the experts. Outside of the block,
taking or loading a state dict of a balanced model or of its optimizer raises an error, because the
experts are not in hub order. `state_dict(keep_vars=True)` of the model raises none, nor does an
optimizer that was created after the move and has not made a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_moe_ep.placement.move import (
    ExpertTensors,
    check_movable,
    check_same_tensors,
    find_expert_tensors,
    move_layers,
)
from hf_moe_ep.ranks.all_ranks import run_on_all
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import ModelState, StateHook, find_state, iterate_experts_modules

_GUARDED = "_hf_moe_ep_guarded"


@contextmanager
def experts_in_hub_order(model: nn.Module, *optimizers: Any) -> Iterator[None]:
    """Restore hub order inside the block. All ranks must enter the block.

    Use this block in your own code that saves a balanced model or loads values into it:

        with experts_in_hub_order(model, optimizer):
            torch.distributed.checkpoint.save({"model": model, "optim": optimizer}, ...)

    `save_pretrained`, `save_checkpoint`, `load_checkpoint`, `hub_tensors`, the Trainer and
    Accelerate's `save_state`, `load_state` and `get_state_dict` restore hub order themselves.

    Args:
        model: patched or not. The block does nothing if no experts were moved.
        optimizers: the optimizers whose state is read or replaced in the block; entries that are
            None are skipped.

    Raises:
        ValueError: this block is inside another block of the same model, and the outer block was
            entered without one of `optimizers`; the state of an optimizer does not have the shape
            or the keys that it has on other ranks. All ranks raise the error.
    """
    state = find_state(model)
    if state is not None:
        for optimizer in optimizers:
            _check_in_hub_order(optimizer, state)
    if state is None or not has_moved_experts(state):
        yield
        return
    # An optimizer that was created after the experts had moved may have no guard yet.
    for optimizer in optimizers:
        if optimizer is not None:
            _guard(optimizer, state)
    slots_of_layers = [layer.slots_E for layer in state.moe_layers]
    _move_all(model, state, [None] * len(slots_of_layers), optimizers)
    state.optimizers_in_order = [_unwrap_optimizer(optimizer) for optimizer in optimizers]
    try:
        yield
    finally:
        state.optimizers_in_order = None
        _move_all(model, state, slots_of_layers, optimizers)


def _check_in_hub_order(optimizer: Any, state: ModelState) -> None:
    """Raise ValueError if a block is active, but was entered without this optimizer."""
    if optimizer is None or state.optimizers_in_order is None:
        return
    unwrapped = _unwrap_optimizer(optimizer)
    if all(other is not unwrapped for other in state.optimizers_in_order):
        raise ValueError(
            f"experts_in_hub_order has restored hub order for the model, but not for the state of "
            f"{type(optimizer).__name__}: write experts_in_hub_order(model, optimizer), and pass "
            f"all optimizers that the block uses"
        )


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def has_moved_experts(state: ModelState) -> bool:
    """Return True if any layer has experts that are not in hub order."""
    return any(layer.slots_E is not None for layer in state.moe_layers)


def map_parameters_to_slots(model: nn.Module) -> dict[int, Tensor]:
    """Map id(parameter) to the row of each expert, for all parameters that are not in hub order."""
    state = find_state(model)
    if state is None or not has_moved_experts(state):
        return {}
    return {
        id(parameter): tensors.layer.slots_E
        for tensors in find_expert_tensors(model)
        for parameter in tensors.parameters.values()
        if tensors.layer.slots_E is not None
    }


def _move_all(
    model: nn.Module, state: ModelState, slots_of_layers: list[Tensor | None], optimizers: Any
) -> None:
    """Move the experts of all layers to `slots_of_layers`, which has one entry per layer."""
    assert state.meshes is not None
    reshard(model)
    optimizers = [optimizer for optimizer in optimizers if optimizer is not None]
    tensors = find_expert_tensors(model)
    # The state of an optimizer may have been replaced since the experts were moved. If a check
    # fails on one rank, `run_on_all` raises the error on all ranks.
    what = "experts_in_hub_order"
    run_on_all(what, lambda: check_movable(tensors, optimizers))
    run_on_all(what, functools.partial(check_same_tensors, what, tensors, optimizers, state.meshes))
    move_layers(tensors, slots_of_layers, state, optimizers)


def guard_state_dicts(
    model: nn.Module,
    state: ModelState,
    tensors: Iterable[ExpertTensors],
    optimizers: Iterable[Any],
) -> None:
    """Make state dicts of the model and its optimizers raise an error outside of hub order.

    An optimizer that is created later gets its hooks at its first step.
    """
    _watch_new_optimizers()
    if not state.guards_state_dicts:
        state.guards_state_dicts = True
        hook = RefuseStateDicts(state)
        for _, module, _ in iterate_experts_modules(model):
            module.register_state_dict_pre_hook(hook)
            module.register_load_state_dict_pre_hook(hook)
    for layer_tensors in tensors:
        for parameter in layer_tensors.parameters.values():
            setattr(parameter, _GUARDED, state)
    for optimizer in optimizers:
        _guard(optimizer, state)


@functools.cache
def _watch_new_optimizers() -> None:
    """Register a hook that runs before each step of every optimizer; once per process."""
    register_optimizer_step_pre_hook(_guard_before_step)


def _guard_before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Guard an optimizer that was created after its experts had moved.

    This hook runs before every step, and acts before the first step that it sees, because torch has
    no earlier hook for all optimizers.

    Raises:
        ValueError: the optimizer has state before its first step, so a state in hub order was
            loaded while the experts were in another order.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = getattr(parameter, _GUARDED, None)
            if state is not None and getattr(optimizer, _GUARDED, None) is not state:
                if has_moved_experts(state) and optimizer.state.get(parameter):
                    raise _make_state_dict_refusal(optimizer)
                _guard(optimizer, state)


def _guard(optimizer: Any, state: ModelState) -> None:
    """Make state dicts of an optimizer raise an error while experts are not in hub order."""
    unwrapped = _unwrap_optimizer(optimizer)
    if getattr(unwrapped, _GUARDED, None) is not state:
        setattr(unwrapped, _GUARDED, state)
        hook = RefuseStateDicts(state)
        unwrapped.register_state_dict_pre_hook(hook)
        unwrapped.register_load_state_dict_pre_hook(hook)


class RefuseStateDicts(StateHook):
    """Hook that refuses to make or load a state dict while experts are not in hub order.

    It is registered on experts modules and on optimizers.
    """

    def __call__(self, owner: Any, *args: Any) -> None:
        if not isinstance(owner, nn.Module):
            _check_in_hub_order(owner, self.state)
        # A module's hook is called with (module, prefix, keep_vars). A caller with keep_vars=True
        # wants the parameters themselves, not values to save.
        keep_vars = isinstance(owner, nn.Module) and args[1:] == (True,)
        if has_moved_experts(self.state) and not keep_vars:
            raise _make_state_dict_refusal(owner)


def _make_state_dict_refusal(owner: Any) -> ValueError:
    return ValueError(
        f"balance_experts has moved experts of this model, so a state dict of "
        f"{type(owner).__name__} would have another order of experts than saved files. Save and "
        f"load inside `with experts_in_hub_order(model, optimizer):`, or with save_pretrained, "
        f"save_checkpoint, load_checkpoint, the Trainer or Accelerate, which restore hub order"
    )
