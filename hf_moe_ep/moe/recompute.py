"""Reuse the exchanges of a checkpointed layer's first run when backward recomputes the layer.

Activation checkpointing runs a layer twice: in forward (the first run), and again in backward (the
recompute). The recompute must not plan the exchanges of tokens again, for two reasons. To plan, the
ranks send each other token counts, which costs a host sync. And a router whose scores differ by a
rounding error (or by noise) may choose other experts, so backward would get other rows than
forward.

transformers and torch call a function to checkpoint a layer. These functions are wrapped: instead
of the layer's forward they receive a `CheckpointedRouting`, which calls that forward. In the first
run it stores the exchanges of every MoE layer. Each recompute reads them in the same order, and
torch.topk returns the stored expert ids to the router (`chosen_topk.py`). The routing weights and
their gradients therefore belong to the rows that were sent.

If ep_size and etp_size are 1, no rows are exchanged, and the router of a recompute chooses again,
as in stock. While routes are recorded or replayed (`routing/`), the expert ids are stored even
then, because backward may run after the `record` or `replay` block has ended. `CheckpointedTokens`
stores for a recompute which tokens are not padding (`padding.py`), whatever ep_size is.

Selective checkpointing (torch's `context_fn`) requires that both runs call the same operators. But
only the first run plans exchanges, and only a recompute compares expert ids with the stored ids.
The operators of these two steps are therefore hidden from selective checkpointing
(`hidden_from_modes`, upstream/autograd_modes.py).

A layer that is checkpointed by another function gets no `CheckpointedRouting`, so all ranks
exchange the token counts again in its recompute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moe_ep.moe.chosen_topk import ChosenTopK
from hf_moe_ep.moe.dispatch.async_exchange import Exchange
from hf_moe_ep.state import STATE, ModelState, StateHook
from hf_moe_ep.upstream.autograd_modes import assert_later
from hf_moe_ep.upstream.modules import CheckpointedFunction, get_own_child, is_compiled

# The attributes that hold the checkpointing function, in transformers (modeling_layers.py) and in
# torch (CheckpointWrapper).
_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
_CHECKPOINTING_FLAG = "gradient_checkpointing"


@dataclass(frozen=True)
class Routed:
    """The routing of one MoE layer in the first run.

    Attributes:
        expert_ids_TK: the experts that the router chose.
        exchanges: the exchange of each chunk of tokens; None if no rows are exchanged.
        num_topks: the number of topk calls that the router makes; read only if `exchanges` is None.
    """

    layer: int
    expert_ids_TK: Tensor
    exchanges: Sequence[Exchange] | None
    num_topks: int


class CheckpointedRouting(CheckpointedFunction):
    """Wraps a checkpointed function: later calls repeat the routing of the first call."""

    def __init__(self, state: ModelState, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._state = state
        self._routed: list[Routed] = []
        # By layer index: routing weights that replace the router's, and the mask [T, 1] of the
        # tokens that get them.
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        # In a recompute: the index in `_routed` of the next layer, and the number of topk calls of
        # this layer that have returned stored ids. `_next` is None outside of a recompute.
        self._next: int | None = None
        self._num_replaced = 0
        self._is_reentrant = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.checkpointed_routing = self._state.checkpointed_routing, self
        try:
            if not self._routed:
                self._is_reentrant = not torch.is_grad_enabled()
                return self._function(*args, **kwargs)
            self._next, self._num_replaced = 0, 0
            # MoE blocks of compiled layers call `repeating_choice` themselves, because
            # torch.compile would trace the mode if it were active here.
            if torch.compiler.is_compiling() or self._state.compile_options is not None:
                return self._function(*args, **kwargs)
            with self.repeating_choice():
                return self._function(*args, **kwargs)
        finally:
            self._state.checkpointed_routing, self._next = outer, None

    def repeating_choice(self) -> AbstractContextManager[Any]:
        """Return a context in which, during a recompute, routers choose as in the first run."""
        if not self.is_recompute:
            return nullcontext()
        return ChosenTopK(self._state.num_experts, self._find_next_ids, self._count_replaced)

    @property
    def is_recompute(self) -> bool:
        """True during a recompute."""
        return self._next is not None

    @property
    def may_stop_early(self) -> bool:
        """True during a recompute that ends once it has computed all tensors that backward needs.

        A reentrant checkpoint first runs without gradients, and recomputes the whole layer.
        """
        return self.is_recompute and not self._is_reentrant

    def keep(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        exchanges: Sequence[Exchange] | None,
        num_topks: int = 1,
    ) -> None:
        """Store the routing of a layer in the first run.

        If `exchanges` is None, a recompute repeats only the choice of experts.
        """
        self._routed.append(Routed(layer, expert_ids_TK, exchanges, num_topks))

    def keep_weights(self, layer: int, weights_TK: Tensor, given_T1: Tensor) -> None:
        """Store routing weights for the tokens where `given_T1` is True.

        For these tokens a recompute uses `weights_TK` instead of the weights of the router.
        """
        self._weights[layer] = weights_TK, given_T1

    def choose_weights(self, layer: int, weights_TK: Tensor) -> Tensor:
        """Return the routing weights of a recompute.

        A token for which `keep_weights` has stored weights gets the stored weights. Every other
        token keeps its row of `weights_TK`, the router's weights.
        """
        if layer not in self._weights:
            return weights_TK
        stored_TK, given_T1 = self._weights[layer]
        return torch.where(given_T1, stored_TK, weights_TK)

    def take(self, layer: int, expert_ids_TK: Tensor) -> Sequence[Exchange]:
        """Return the stored exchanges of the next layer.

        If the expert ids differ from the stored ids, `assert_later` stops the program later.

        Raises:
            RuntimeError: the first run reached another layer at this point, or the same layer with
                another number of tokens.
        """
        assert self._next is not None
        routed = self._find_next_layer()
        if (
            routed is None
            or routed.layer != layer
            or routed.expert_ids_TK.shape != expert_ids_TK.shape
        ):
            expected = "no layer"
            if routed is not None:
                expected = f"MoE layer {routed.layer} with {tuple(routed.expert_ids_TK.shape)}"
            raise RuntimeError(
                f"the recompute of a checkpointed function reached MoE layer {layer} with expert "
                f"ids {tuple(expert_ids_TK.shape)}, but at this point forward ran {expected}. A "
                "checkpointed function must run the same layers on the same tokens in each call"
            )
        assert routed.exchanges is not None
        self._next += 1
        if routed.expert_ids_TK is expert_ids_TK:
            return routed.exchanges
        # The next exchange of counts could make this check, but an optimizer step with wrong
        # gradients could run before that exchange.
        assert_later(
            (routed.expert_ids_TK == expert_ids_TK).all(),
            f"recomputing MoE layer {layer}, the router chose other experts than in forward. The "
            "choice cannot be repeated, because the router does not use torch.topk; make the "
            "router deterministic, or train without activation checkpointing",
        )
        return routed.exchanges

    def _find_next_layer(self) -> Routed | None:
        """Return the next MoE layer of a recompute, or None after the last one."""
        assert self._next is not None
        return self._routed[self._next] if self._next < len(self._routed) else None

    def _find_next_ids(self) -> Tensor | None:
        """Return the stored expert ids of the next layer, or None if topk must not be replaced.

        topk must not be replaced after the last layer, while modules run that do not route
        (`SetMayRoute`), and while a checkpointed function inside this function runs, because the
        inner function has its own `CheckpointedRouting`.
        """
        if not self._state.may_route:
            return None
        routed = self._find_next_layer() if self._state.checkpointed_routing is self else None
        return None if routed is None else routed.expert_ids_TK

    def _count_replaced(self, expert_ids_TK: Tensor, _: Callable[[], Tensor]) -> Tensor:
        """Count a topk call that returns stored ids, and return these ids.

        A layer without exchanges does not call `take`, so its last topk call moves on to the next
        layer.
        """
        routed = self._find_next_layer()
        assert self._next is not None and routed is not None
        self._num_replaced += 1
        if routed.exchanges is None and self._num_replaced >= routed.num_topks:
            self._next, self._num_replaced = self._next + 1, 0
        return expert_ids_TK


class SetMayRoute(StateHook):
    """Pre-forward or forward hook: records whether routers may call topk from now on.

    Compiled layers replace topk only inside of their MoE blocks, so they do not need this record.
    """

    def __init__(self, state: ModelState, value: bool) -> None:
        super().__init__(state)
        self._value = value

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.state.may_route = self._value


class CheckpointedTokens(CheckpointedFunction):
    """Wraps a checkpointed function: its recompute leaves out the same padding as its first run."""

    def __init__(self, state: ModelState, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._state = state
        self._tokens = replace(state.real_tokens, is_kept=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.real_tokens = self._state.real_tokens, self._tokens
        try:
            return self._function(*args, **kwargs)
        finally:
            self._state.real_tokens = outer


class ModuleEdge(NamedTuple):
    """One edge in the tree of modules: `parent.name` is `child`."""

    parent: nn.Module
    name: str
    child: nn.Module


class CheckpointWatch:
    """Wraps the functions that checkpoint the MoE layers of a model.

    Only a module on a path from the root to an experts module can hold such a function. Users
    switch checkpointing on and off between forwards, so `wrap_functions` checks the modules on
    these paths in each forward. The function searches the paths again if a module on them was
    replaced, for example a layer by torch's CheckpointWrapper.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._edges: list[ModuleEdge] = []

    @torch.compiler.disable
    def wrap_functions(self, root: nn.Module, *, dispatches: bool = True) -> None:
        """Wrap every checkpointing function that is not wrapped yet.

        With `dispatches`, warn of layers that torch.compile cannot compile while they send tokens.
        """
        unchanged = (get_own_child(parent, name) is child for parent, name, child in self._edges)
        if not (self._edges and all(unchanged)):
            self._edges = _find_edges_to_experts(root)
        for module in (root, *(edge.child for edge in self._edges)):
            if dispatches and is_compiled(module) and getattr(module, _CHECKPOINTING_FLAG, False):
                warnings.warn(
                    f"{type(module).__name__} was compiled as a whole, and torch.compile does not "
                    f"compile a checkpointed layer whose tokens are dispatched; leave out "
                    f"layer.compile() and call hf_moe_ep.compile_layers(model)",
                    stacklevel=2,
                )
            for name in _ATTRIBUTES:
                function = vars(module).get(name)
                if function is not None and not _is_ours(function):
                    setattr(module, name, partial(_checkpoint, self._state, function))


def _find_edges_to_experts(root: nn.Module) -> list[ModuleEdge]:
    """Return all edges on the paths from the root to experts modules, without duplicates."""
    edges: dict[tuple[int, str], ModuleEdge] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        # Experts modules have the attribute STATE. So has the root, whose path is empty.
        if STATE not in vars(module) or not path:
            continue
        parent = root
        for name in path.split("."):
            child = parent.get_submodule(name)
            edges[id(parent), name] = ModuleEdge(parent, name, child)
            parent = child
    return list(edges.values())


def unwatch_checkpoints(model: nn.Module) -> None:
    """Restore every function that `CheckpointWatch` has wrapped."""
    for module in model.modules():
        for name in _ATTRIBUTES:
            function = vars(module).get(name)
            if isinstance(function, partial) and _is_ours(function):
                setattr(module, name, function.args[1])


def _is_ours(function: Any) -> bool:
    """Return True if `CheckpointWatch` has wrapped a function.

    After Ctrl-C, a wrapper of `sequence/mixers.py` may be left around ours.
    """
    if not isinstance(function, partial):
        return False
    return function.func is _checkpoint or any(map(_is_ours, function.args))


def _checkpoint(
    state: ModelState,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the checkpointing function `checkpoint` with new wrappers around `function`."""
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)  # a traced forward exchanges no rows
    if state.real_tokens is not None:
        function = CheckpointedTokens(state, function)
    # If checkpointed functions are nested, each layer is stored by the innermost function alone.
    is_nested = state.checkpointed_routing is not None
    if state.exchanges_rows or state.routing is not None or is_nested:
        function = CheckpointedRouting(state, function)
    return checkpoint(function, *args, **kwargs)
