"""A checkpointed layer that is computed again sends its rows where they went the first time.

Activation checkpointing runs a layer twice: once in forward, once in backward. The second run must
not ask anew what goes where: another exchange of counts costs a host sync, and a router that
decides otherwise by a rounding (or by noise) would give backward rows that forward never saw.

So the functions that Transformers and torch call to checkpoint a layer are wrapped: what they are
given to run is a `Frame`, which keeps the exchanges that its first run planned and hands them out,
in the same order, in every later one. While it does, the router chooses what it chose before
(`chosen_topk.py`), so its weights, and their gradients, are those of the rows that travelled.

Without ep nothing is exchanged, and a router chooses anew, as in stock. While routes are recorded
or replayed (`routing/`) a frame keeps the choice there as well: backward may run after that.

Selective checkpointing (torch's `context_fn`) counts the operators of both runs, so what only one
of them needs, planning in the first and the taking of values in the others, is hidden from it.

Checkpoints of other making have no frame: their second run exchanges counts again, on all ranks
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moe_ep.dispatcher import CheckpointFrame, Exchange
from hf_moe_ep.moe.chosen_topk import ChosenTopK
from hf_moe_ep.state import STATE, ModelState
from hf_moe_ep.upstream.autograd_modes import assert_later
from hf_moe_ep.upstream.modules import own_child

# Where transformers (modeling_layers.py) and torch (CheckpointWrapper) keep what checkpoints.
_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


@dataclass(frozen=True)
class Routed:
    """One MoE layer's first run: the router's choice, and the exchanges planned from it.

    None where nothing is exchanged; `topks` are then the calls that the choice answers.
    """

    layer: int
    expert_ids_TK: Tensor
    exchanges: Sequence[Exchange] | None
    topks: int


class Frame(CheckpointFrame):
    """What a checkpoint runs, twice or more; the first run is the one that counts."""

    def __init__(self, state: ModelState, function: Callable[..., Any]) -> None:
        self._state, self._function = state, function
        self._routed: list[Routed] = []
        # By MoE layer: weights from elsewhere, and the tokens that have them.
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: int | None = None
        self._answered = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.frame = self._state.frame, self
        try:
            if not self._routed:
                return self._function(*args, **kwargs)
            self._next, self._answered = 0, 0
            if torch.compiler.is_compiling():
                return self._function(*args, **kwargs)
            with ChosenTopK(self._state.num_experts, self._upcoming_ids, self._decided):
                return self._function(*args, **kwargs)
        finally:
            self._state.frame, self._next = outer, None

    @property
    def replaying(self) -> bool:
        """Whether this is a later run."""
        return self._next is not None

    def keep(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        exchanges: Sequence[Exchange] | None,
        topks: int = 1,
    ) -> None:
        """Remember a layer of the first run; without exchanges its router alone comes back."""
        self._routed.append(Routed(layer, expert_ids_TK, exchanges, topks))

    def keep_weights(self, layer: int, weights_TK: Tensor, given_T1: Tensor) -> None:
        """Remember weights that were put in place of the router's, and for which tokens."""
        self._weights[layer] = weights_TK, given_T1

    def weights(self, layer: int, weights_TK: Tensor) -> Tensor:
        """Return the weights that a later run computes with: the router's, or those kept."""
        if layer not in self._weights:
            return weights_TK
        kept_TK, given_T1 = self._weights[layer]
        return torch.where(given_T1, kept_TK, weights_TK)

    def take(self, layer: int, expert_ids_TK: Tensor) -> Sequence[Exchange]:
        """Return what was kept of the upcoming layer, whose router must have chosen the same."""
        assert self._next is not None
        routed = self._upcoming()
        if (
            routed is None
            or routed.layer != layer
            or routed.expert_ids_TK.shape != expert_ids_TK.shape
        ):
            was = "none"
            if routed is not None:
                was = f"{routed.layer}, {tuple(routed.expert_ids_TK.shape)}"
            raise RuntimeError(
                f"recomputing a checkpointed layer reached MoE layer {layer} with expert ids "
                f"{tuple(expert_ids_TK.shape)}, but forward had there: {was}. A checkpointed "
                "function must do the same each time it runs"
            )
        assert routed.exchanges is not None
        self._next += 1
        if routed.expert_ids_TK is expert_ids_TK:
            return routed.exchanges
        # Not a flag that the next exchange of counts brings: by then an optimizer would have
        # stepped with wrong gradients.
        assert_later(
            (routed.expert_ids_TK == expert_ids_TK).all(),
            f"recomputing MoE layer {layer}, the router chose other experts than in forward and "
            "does not choose by torch.topk, so its choice cannot be repeated; make it "
            "deterministic, or train without activation checkpointing",
        )
        return routed.exchanges

    def _upcoming(self) -> Routed | None:
        """Find the next MoE layer of a later run; None behind the last one."""
        assert self._next is not None
        return self._routed[self._next] if self._next < len(self._routed) else None

    def _upcoming_ids(self) -> Tensor | None:
        """Say what the next router of a later run chooses; None in a checkpoint within this one."""
        routed = self._upcoming() if self._state.frame is self else None
        return None if routed is None else routed.expert_ids_TK

    def _decided(self, expert_ids_TK: Tensor, live: Callable[[], Tensor]) -> Tensor:
        """Go on to the next layer, where nobody is going to `take` this one."""
        routed = self._upcoming()
        assert self._next is not None and routed is not None
        self._answered += 1
        if routed.exchanges is None and self._answered >= routed.topks:
            self._next, self._answered = self._next + 1, 0
        return expert_ids_TK


class Step(NamedTuple):
    """One step on a way down the tree of modules: `child` is `parent`'s under that name."""

    parent: nn.Module
    name: str
    child: nn.Module


class CheckpointWatch:
    """Wraps whatever checkpoints a MoE layer of a model.

    What does so holds an experts module: it is on the way from the root down to it. Users switch
    checkpointing on and off between forwards, so each `look` reads the modules on these ways, and
    no others. The ways are walked anew where one of their modules was exchanged for another, as
    torch's CheckpointWrapper exchanges a layer.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._steps: list[Step] = []

    @torch.compiler.disable
    def look(self, root: nn.Module) -> None:
        """Wrap the functions that checkpoint now; once each."""
        as_before = (own_child(parent, name) is child for parent, name, child in self._steps)
        if not (self._steps and all(as_before)):
            self._steps = _steps_to_experts(root)
        for module in (root, *(step.child for step in self._steps)):
            for name in _ATTRIBUTES:
                function = vars(module).get(name)
                if function is not None and not _is_ours(function):
                    setattr(module, name, partial(_checkpoint, self._state, function))


def _steps_to_experts(root: nn.Module) -> list[Step]:
    """Walk all modules; the steps on the ways to experts, each once."""
    steps: dict[tuple[int, str], Step] = {}
    for way, module in root.named_modules(remove_duplicate=False):
        if STATE not in vars(module) or not way:
            continue
        parent = root
        for name in way.split("."):
            child = parent.get_submodule(name)
            steps[id(parent), name] = Step(parent, name, child)
            parent = child
    return list(steps.values())


def unwatch_checkpoints(model: nn.Module) -> None:
    """Take every wrapper of `CheckpointWatch` off again."""
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
