"""A recomputed checkpointed layer repeats the exchanges of its first run.

Activation checkpointing runs a layer twice: once in forward and once in backward. The recompute
must not plan its exchanges anew. Another exchange of counts would cost a host sync, and a router
whose choice changes by a rounding (or by noise) would give backward other rows than forward had.

The functions that transformers and torch call to checkpoint a layer are therefore wrapped: instead
of the layer's forward they get a `Frame` of it. The frame stores the exchanges that its first run
plans, and every recompute takes them in the same order. During a recompute the router repeats its
choice (`chosen_topk.py`), so the routing weights and their gradients are those of the rows that
were sent.

Without ep no rows are exchanged, and the router of a recompute chooses anew, as in stock. While
routes are recorded or replayed (`routing/`), a frame stores the choice even then, because backward
may run after the end of that block.

Selective checkpointing (torch's `context_fn`) compares the operators of both runs. The planning in
the first run and the reading of stored values in a recompute are hidden from it.

Other checkpointing functions get no frame: their recompute exchanges counts again, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moe_ep.moe.chosen_topk import ChosenTopK
from hf_moe_ep.moe.dispatch.async_exchange import Exchange
from hf_moe_ep.state import STATE, ModelState
from hf_moe_ep.upstream.autograd_modes import assert_later
from hf_moe_ep.upstream.modules import own_child

# The attributes that hold the checkpointing function, in transformers (modeling_layers.py) and in
# torch (CheckpointWrapper).
_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


@dataclass(frozen=True)
class Routed:
    """The first run of one MoE layer.

    Attributes:
        expert_ids_TK: the router's choice.
        exchanges: the exchanges that were planned from it; None if no rows are exchanged.
        num_topks: without exchanges, how many calls of topk the router makes its choice by.
    """

    layer: int
    expert_ids_TK: Tensor
    exchanges: Sequence[Exchange] | None
    num_topks: int


class Frame:
    """A checkpointed function, which runs twice or more; later runs repeat the first one."""

    def __init__(self, state: ModelState, function: Callable[..., Any]) -> None:
        self._state, self._function = state, function
        self._routed: list[Routed] = []
        # By MoE layer: weights that replaced the router's, and a mask of the tokens that have them.
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        # In a recompute: the index of the next layer, and the calls of topk that were replaced.
        self._next: int | None = None
        self._num_replaced = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.frame = self._state.frame, self
        try:
            if not self._routed:
                return self._function(*args, **kwargs)
            self._next, self._num_replaced = 0, 0
            if torch.compiler.is_compiling():
                return self._function(*args, **kwargs)
            with ChosenTopK(self._state.num_experts, self._next_ids, self._count_replaced):
                return self._function(*args, **kwargs)
        finally:
            self._state.frame, self._next = outer, None

    @property
    def replaying(self) -> bool:
        """True during a recompute."""
        return self._next is not None

    def keep(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        exchanges: Sequence[Exchange] | None,
        num_topks: int = 1,
    ) -> None:
        """Store a layer of the first run; without exchanges a recompute repeats only its choice."""
        self._routed.append(Routed(layer, expert_ids_TK, exchanges, num_topks))

    def keep_weights(self, layer: int, weights_TK: Tensor, given_T1: Tensor) -> None:
        """Store weights that replace the router's for the tokens of which `given_T1` is true."""
        self._weights[layer] = weights_TK, given_T1

    def weights(self, layer: int, weights_TK: Tensor) -> Tensor:
        """Return the weights for a recompute: the router's, or the stored ones."""
        if layer not in self._weights:
            return weights_TK
        stored_TK, given_T1 = self._weights[layer]
        return torch.where(given_T1, stored_TK, weights_TK)

    def take(self, layer: int, expert_ids_TK: Tensor) -> Sequence[Exchange]:
        """Return the stored exchanges of the next layer, whose router must have chosen the same."""
        assert self._next is not None
        routed = self._next_layer()
        if (
            routed is None
            or routed.layer != layer
            or routed.expert_ids_TK.shape != expert_ids_TK.shape
        ):
            was = "no layer"
            if routed is not None:
                was = f"MoE layer {routed.layer} with {tuple(routed.expert_ids_TK.shape)}"
            raise RuntimeError(
                f"a recompute of checkpointed layers reached MoE layer {layer} with expert ids "
                f"{tuple(expert_ids_TK.shape)}, but at this point forward ran {was}. A "
                "checkpointed function must do the same each time it runs"
            )
        assert routed.exchanges is not None
        self._next += 1
        if routed.expert_ids_TK is expert_ids_TK:
            return routed.exchanges
        # Not checked together with the next exchange of counts: by then an optimizer would have
        # used wrong gradients.
        assert_later(
            (routed.expert_ids_TK == expert_ids_TK).all(),
            f"recomputing MoE layer {layer}, the router chose other experts than in forward and "
            "does not choose by torch.topk, so its choice cannot be repeated; make the router "
            "deterministic, or train without activation checkpointing",
        )
        return routed.exchanges

    def _next_layer(self) -> Routed | None:
        """Return the next MoE layer of a recompute, or None after the last one."""
        assert self._next is not None
        return self._routed[self._next] if self._next < len(self._routed) else None

    def _next_ids(self) -> Tensor | None:
        """Return the choice of the next router; None inside of a checkpoint within this one."""
        routed = self._next_layer() if self._state.frame is self else None
        return None if routed is None else routed.expert_ids_TK

    def _count_replaced(self, expert_ids_TK: Tensor, live: Callable[[], Tensor]) -> Tensor:
        """Count a replaced topk, and go on to the next layer if nobody will `take` this one."""
        routed = self._next_layer()
        assert self._next is not None and routed is not None
        self._num_replaced += 1
        if routed.exchanges is None and self._num_replaced >= routed.num_topks:
            self._next, self._num_replaced = self._next + 1, 0
        return expert_ids_TK


class Step(NamedTuple):
    """One edge of the tree of modules: `child` is the attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    child: nn.Module


class CheckpointWatch:
    """Wraps the functions that checkpoint a MoE layer of a model.

    Only a module on a path from the root to an experts module can hold such a function. Users
    switch checkpointing on and off between forwards, so each `look` checks the modules on these
    paths. The paths are searched again when one of their modules was replaced by another, as
    torch's CheckpointWrapper replaces a layer.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._steps: list[Step] = []

    @torch.compiler.disable
    def look(self, root: nn.Module) -> None:
        """Wrap every checkpointing function that is not wrapped yet."""
        unchanged = (own_child(parent, name) is child for parent, name, child in self._steps)
        if not (self._steps and all(unchanged)):
            self._steps = _steps_to_experts(root)
        for module in (root, *(step.child for step in self._steps)):
            for name in _ATTRIBUTES:
                function = vars(module).get(name)
                if function is not None and not _is_ours(function):
                    setattr(module, name, partial(_checkpoint, self._state, function))


def _steps_to_experts(root: nn.Module) -> list[Step]:
    """Find the paths to all experts modules, each of their steps once."""
    steps: dict[tuple[int, str], Step] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if STATE not in vars(module) or not path:
            continue
        parent = root
        for name in path.split("."):
            child = parent.get_submodule(name)
            steps[id(parent), name] = Step(parent, name, child)
            parent = child
    return list(steps.values())


def unwatch_checkpoints(model: nn.Module) -> None:
    """Remove every wrapper of `CheckpointWatch`."""
    for module in model.modules():
        for name in _ATTRIBUTES:
            function = vars(module).get(name)
            if isinstance(function, partial) and _is_ours(function):
                setattr(module, name, function.args[1])


def _is_ours(function: Any) -> bool:
    return isinstance(function, partial) and function.func is _checkpoint


def _checkpoint(
    state: ModelState,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return checkpoint(Frame(state, function), *args, **kwargs)
