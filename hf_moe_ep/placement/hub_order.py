"""Restore hub order temporarily, for code that reads or writes experts by their numbers.

Files, state dicts and other models identify experts by their numbers; slots exist only in a
balanced model. Code that saves or loads therefore runs in a block in which the experts are moved
back:

    with experts_in_hub_order(model, optimizer):
        ...                                 expert e of a stacked tensor is its row e

This sends the bytes of the moved experts twice, and needs no second copy of them. All files are
therefore equal to those of a model that was never balanced. Outside of the block, a state dict of
such a model or of its optimizer is an error, because its experts would be permuted.
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
    move_experts,
)
from hf_moe_ep.ranks.together import together
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import STATE, ModelState, MoELayer, Ours, find_state

_GUARDED = "_hf_moe_ep_guarded"


@contextmanager
def experts_in_hub_order(model: nn.Module, *optimizers: Any) -> Iterator[None]:
    """Put the experts into hub order inside the block; every rank enters it.

    Use it in your own code that saves a balanced model, or loads into it:

        with experts_in_hub_order(model, optimizer):
            torch.distributed.checkpoint.save({"model": model, "optim": optimizer}, ...)

    `save_pretrained`, `save_checkpoint`, `load_checkpoint`, `hub_tensors`, the Trainer and
    Accelerate's `save_state`, `load_state` and `get_state_dict` do this themselves.

    Args:
        model: patched or not; nothing happens if no experts were moved.
        optimizers: the optimizers whose state is read or replaced in the block; None is skipped.

    Raises:
        ValueError: on every rank: this block is inside another block of the same model, which was
            entered without these optimizers.
    """
    state = find_state(model)
    if state is not None:
        for optimizer in optimizers:
            _check_in_hub_order(optimizer, state)
    if state is None or not is_placed(state):
        yield
        return
    # An optimizer that is loaded in this block may have been made after the experts moved.
    for optimizer in optimizers:
        if optimizer is not None:
            _guard(optimizer, state)
    before = [layer.placement for layer in state.moe_layers]
    _move_to(model, state, [None] * len(before), optimizers)
    state.optimizers_in_order = [_stock(optimizer) for optimizer in optimizers]
    try:
        yield
    finally:
        state.optimizers_in_order = None
        _move_to(model, state, before, optimizers)


def _check_in_hub_order(optimizer: Any, state: ModelState) -> None:
    """Raise ValueError inside a block that was entered without this optimizer."""
    if optimizer is None or state.optimizers_in_order is None:
        return
    if all(one is not _stock(optimizer) for one in state.optimizers_in_order):
        raise ValueError(
            f"experts are in hub order here, but the state of {type(optimizer).__name__} is not: "
            f"write experts_in_hub_order(model, optimizer), with the optimizer too"
        )


def _stock(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)  # behind Accelerate's wrapper


def is_placed(state: ModelState) -> bool:
    """Return whether the experts of some layer are not in hub order."""
    return any(layer.placement is not None for layer in state.moe_layers)


def placement_by_tensor(model: nn.Module) -> dict[int, Tensor]:
    """Return, by the id of each parameter that is not in hub order, the slots of its experts."""
    state = find_state(model)
    if state is None or not is_placed(state):
        return {}
    return {
        id(parameter): one.layer.placement
        for one in find_expert_tensors(model)
        for parameter in one.parameters.values()
        if one.layer.placement is not None
    }


def _move_to(
    model: nn.Module, state: ModelState, placements: list[Tensor | None], optimizers: Any
) -> None:
    assert state.meshes is not None
    reshard(model)
    held = [optimizer for optimizer in optimizers if optimizer is not None]
    tensors = find_expert_tensors(model)
    # The state of an optimizer may have been replaced since the experts were moved.
    together("experts_in_hub_order", lambda: check_movable(tensors, held))
    check_same_tensors("experts_in_hub_order", tensors, held)
    for one in tensors:
        move_experts(one, placements[one.layer.index], state.meshes, held)


def guard_state_dicts(
    model: nn.Module,
    state: ModelState,
    tensors: Iterable[ExpertTensors],
    optimizers: Iterable[Any],
) -> None:
    """Register hooks that refuse state dicts of the model and its optimizers outside hub order.

    An optimizer that is made of these experts later is recognised at its first step.
    """
    _watch_new_optimizers()
    if not state.guards_state_dicts:
        state.guards_state_dicts = True
        hook = NotInHubOrder(state)
        for module in model.modules():
            if isinstance(vars(module).get(STATE), MoELayer):
                module.register_state_dict_pre_hook(hook)
                module.register_load_state_dict_pre_hook(hook)
    for one in tensors:
        for parameter in one.parameters.values():
            setattr(parameter, _GUARDED, state)
    for optimizer in optimizers:
        _guard(optimizer, state)


@functools.cache
def _watch_new_optimizers() -> None:
    """Register a hook before every optimizer's step, once per process."""
    register_optimizer_step_pre_hook(_guard_before_step)


def _guard_before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse state dicts of an optimizer that was made of experts which had moved by then.

    Runs before the first step of the optimizer, as no earlier hook exists for all optimizers.

    Raises:
        ValueError: the optimizer has state already: it was loaded before its first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = getattr(parameter, _GUARDED, None)
            if state is not None and getattr(optimizer, _GUARDED, None) is not state:
                if is_placed(state) and optimizer.state.get(parameter):
                    raise _state_dict_refusal(optimizer)
                _guard(optimizer, state)


def _guard(optimizer: Any, state: ModelState) -> None:
    stock = _stock(optimizer)
    if getattr(stock, _GUARDED, None) is not state:
        setattr(stock, _GUARDED, state)
        hook = NotInHubOrder(state)
        stock.register_state_dict_pre_hook(hook)
        stock.register_load_state_dict_pre_hook(hook)


class NotInHubOrder(Ours):
    """Hook before a state dict of the model or of its optimizer is made or loaded: refuses it."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, owner: Any, *args: Any) -> None:
        if not isinstance(owner, nn.Module):
            _check_in_hub_order(owner, self.state)
        # keep_vars=True asks for the parameters themselves, not for values to save.
        wants_variables = isinstance(owner, nn.Module) and args[1:] == (True,)
        if is_placed(self.state) and not wants_variables:
            raise _state_dict_refusal(owner)


def _state_dict_refusal(owner: Any) -> ValueError:
    return ValueError(
        f"balance_experts has moved experts of this model, so a state dict of "
        f"{type(owner).__name__} would have them in another order than files have; save and load "
        f"with save_pretrained, save_checkpoint, load_checkpoint, the Trainer or Accelerate, which "
        f"restore the order, or inside `with experts_in_hub_order(model, optimizer):`"
    )
