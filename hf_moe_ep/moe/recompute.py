"""A checkpointed layer that is computed again sends its rows where they went the first time.

Activation checkpointing runs a layer twice: once in forward, once in backward. The second run must
not ask anew what goes where: another exchange of counts costs a host sync, and a router that
decides otherwise by a rounding (or by noise) would give backward rows that forward never saw.

So the functions that Transformers and torch call to checkpoint a layer are wrapped: what they are
given to run is a `Frame`, which keeps the dispatch plans of its first run and hands them out, in
the same order, in every later one. While it does, `torch.topk` over the experts returns the
indices that were chosen before with the values that stand there now, so the router's weights, and
their gradients, are those of the rows that travelled.

Selective checkpointing (torch's `context_fn`) counts the operators of both runs, so what only one
of them needs, plans in the first and the taking of values in the others, is hidden from it.

Checkpoints of other making have no frame: their second run exchanges counts again, on all ranks
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hf_moe_ep.moe.dispatch.all_to_all import DispatchPlan
from hf_moe_ep.moe.dispatch.deepep import DeepEPPlan
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.autograd_modes import assert_later, hidden_from_modes

Plan = DispatchPlan | DeepEPPlan

# Where transformers (modeling_layers.py) and torch (CheckpointWrapper) keep what checkpoints.
_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


@dataclass(frozen=True)
class Routed:
    """One MoE layer's first run: the router's choice, and the plans made from it."""

    layer: int
    expert_ids_TK: Tensor
    plans: Sequence[Plan]


class Frame:
    """What a checkpoint runs, twice or more; the first run is the one that counts."""

    def __init__(self, state: ModelState, function: Callable[..., Any]) -> None:
        self._state, self._function = state, function
        self._routed: list[Routed] = []
        self._next: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self._state.frame = self._state.frame, self
        try:
            if not self._routed:
                return self._function(*args, **kwargs)
            self._next = 0
            if torch.compiler.is_compiling():
                return self._function(*args, **kwargs)
            with _SameTopK(self, self._state.num_experts):
                return self._function(*args, **kwargs)
        finally:
            self._state.frame, self._next = outer, None

    @property
    def running(self) -> bool:
        """Whether no checkpoint within this one runs now."""
        return self._state.frame is self

    @property
    def replaying(self) -> bool:
        """Whether this is a later run."""
        return self._next is not None

    @property
    def upcoming(self) -> Routed | None:
        """The next MoE layer of a later run; None behind the last one."""
        assert self._next is not None
        return self._routed[self._next] if self._next < len(self._routed) else None

    def keep(self, routed: Routed) -> None:
        """Remember a layer of the first run."""
        self._routed.append(routed)

    def take(self, layer: int, expert_ids_TK: Tensor) -> Sequence[Plan]:
        """The plans of the upcoming layer, whose router must have chosen what it chose before."""
        assert self._next is not None
        routed = self.upcoming
        if (
            routed is None
            or routed.layer != layer
            or routed.expert_ids_TK.shape != expert_ids_TK.shape
        ):
            was = (
                "none" if routed is None else f"{routed.layer}, {tuple(routed.expert_ids_TK.shape)}"
            )
            raise RuntimeError(
                f"recomputing a checkpointed layer reached MoE layer {layer} with expert ids "
                f"{tuple(expert_ids_TK.shape)}, but forward had there: {was}. A checkpointed "
                "function must do the same each time it runs"
            )
        self._next += 1
        if routed.expert_ids_TK is expert_ids_TK:
            return routed.plans
        assert_later(
            (routed.expert_ids_TK == expert_ids_TK).all(),
            f"recomputing MoE layer {layer}, the router chose other experts than in forward and "
            "does not choose by torch.topk, so its choice cannot be repeated; make it "
            "deterministic, or train without activation checkpointing",
        )
        return routed.plans


class _SameTopK(TorchFunctionMode):
    """`topk` over the experts gives the indices of the frame's upcoming layer."""

    def __init__(self, frame: Frame, num_experts: int) -> None:
        super().__init__()
        self._frame, self._num_experts = frame, num_experts

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or not self._frame.running:
            return func(*args, **kwargs)
        routed = self._frame.upcoming
        if routed is None:
            return func(*args, **kwargs)
        scores, k = (*args, *(kwargs[name] for name in ("input", "k") if name in kwargs))[:2]
        ids_TK = routed.expert_ids_TK
        shape = (*scores.shape[:-1], k)
        if scores.shape[-1] != self._num_experts or math.prod(shape) != ids_TK.numel():
            return func(*args, **kwargs)
        ids = ids_TK if ids_TK.shape == shape else ids_TK.view(shape)
        with hidden_from_modes():
            return torch.return_types.topk((_Take.apply(scores, ids), ids))


class _Take(torch.autograd.Function):
    """`scores.gather(-1, ids)` that keeps for backward what topk keeps, the indices alone:
    checkpointing counts the tensors that both runs keep.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = scores.shape
        return scores.gather(-1, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(-1, ids, grad), None


@torch.compiler.disable
def watch_checkpoints(model: nn.Module, state: ModelState) -> None:
    """Wrap whatever checkpoints a layer of `model` now; once each."""
    for module in model.modules():
        for name in _ATTRIBUTES:
            function = vars(module).get(name)
            if function is not None and not _is_ours(function):
                setattr(module, name, partial(_checkpoint, state, function))


def unwatch_checkpoints(model: nn.Module) -> None:
    """Take every wrapper of `watch_checkpoints` off again."""
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
