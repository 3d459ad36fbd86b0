"""How many tokens chose each expert, counted on the device where a MoE layer begins.

    choice_counts[l, e]    (token, slot) pairs of this rank's own tokens that layer l sent to
                           expert e, in every training forward since the first one

The sender counts, before anything travels, so the sum over all ranks has every token once: ranks
of an sp group have slices of their own, and no rank counts what arrives. One small kernel makes
the ones and one adds them up; the host waits for nothing. Whoever reads the counts keeps what it
has read before (`ModelState.counted`): they are never set back.

What counts is a forward that leads to gradients, once: in training mode, with gradients enabled
where the model was called, and not while a backward runs, when checkpoints compute layers again.
Gradients enabled *here* would not do, as a reentrant checkpoint runs its first time without.

Padding that reaches a router is computed by experts like any other token, and counts; so do the few
with which sp fills a sequence up to a multiple of its ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.state import ModelState, MoELayer, Ours
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes


class ForwardBegins(Ours):
    """Pre-forward hook of the root: notes whether this forward leads to gradients."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.leads_to_gradients = torch.is_grad_enabled()


class ForwardEnds(Ours):
    """Forward hook of the root: parts of the model that are called alone answer for themselves."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.state.leads_to_gradients = False


def count_choice(layer: MoELayer, training: bool, expert_ids_TK: Tensor) -> None:
    """Add what this rank's tokens chose in `layer`, if this forward counts."""
    state = layer.model
    if not (training and (state.leads_to_gradients or torch.is_grad_enabled())):
        return
    if torch.compiler.is_compiling():
        # A compiled checkpoint computes again without coming back here.
        _add(layer, expert_ids_TK)
    elif not backward_is_running():
        # Selective checkpointing compares the operators of both runs.
        with hidden_from_modes():
            _add(layer, expert_ids_TK)


def _add(layer: MoELayer, expert_ids_TK: Tensor) -> None:
    state, ids = layer.model, expert_ids_TK.detach().flatten().long()
    if state.choice_counts is None:
        state.choice_counts = ids.new_zeros(len(state.moe_layers), state.num_experts)
    elif layer.index == 0 and state.choice_counts.device != ids.device:
        state.choice_counts = state.choice_counts.to(ids.device)
    # In one process, layers of a model may lie on several devices.
    ids = ids.to(state.choice_counts.device)
    state.choice_counts[layer.index].scatter_add_(0, ids, torch.ones_like(ids))
