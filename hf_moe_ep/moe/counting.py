"""Count on the device how many tokens chose each expert.

    choice_counts[l, e]    (token, slot) pairs of this rank's own tokens that layer l sent to
                           expert e, in all training forwards since the first one

Each rank counts its own tokens before they are dispatched, so the sum over all ranks contains every
token once (the ranks of an sp group have different slices). The host waits for nothing. The counts
only grow: each reader remembers the counts of its last reading (`ModelState.counted`, see
`routing/counts.py`).

Each forward that leads to gradients is counted once: in training mode, with gradients enabled where
the model was called, and not while a backward runs, because that is a recompute. It is not enough
to look whether gradients are enabled inside the layer: a reentrant checkpoint runs its first time
without gradients.

Padding tokens are counted like other tokens, since the experts compute them, and so is the padding
by which sp makes the length of a sequence a multiple of its ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.state import ModelState, MoELayer, Ours
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes


class ForwardBegins(Ours):
    """Pre-forward hook of the root: records whether this forward leads to gradients."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.leads_to_gradients = torch.is_grad_enabled()


class ForwardEnds(Ours):
    """Forward hook of the root: clears the record of `ForwardBegins`.

    A part of the model that is called alone is counted if gradients are enabled there.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.state.leads_to_gradients = False


def count_choice(layer: MoELayer, training: bool, expert_ids_TK: Tensor) -> None:
    """Count the choice of this rank's tokens in `layer`, if this forward is to be counted."""
    state = layer.model
    if not (training and (state.leads_to_gradients or torch.is_grad_enabled())):
        return
    if torch.compiler.is_compiling():
        # The recompute of a compiled checkpoint does not run this function again.
        _add(layer, expert_ids_TK)
    elif not backward_is_running():
        # Selective checkpointing compares the operators of both runs, and only one of them counts.
        with hidden_from_modes():
            _add(layer, expert_ids_TK)


def _add(layer: MoELayer, expert_ids_TK: Tensor) -> None:
    state, ids = layer.model, expert_ids_TK.detach().flatten().long()
    if state.choice_counts is None:
        state.choice_counts = ids.new_zeros(len(state.moe_layers), state.num_experts)
    elif layer.index == 0 and state.choice_counts.device != ids.device:
        state.choice_counts = state.choice_counts.to(ids.device)
    # In one process the layers of a model may be on several devices.
    ids = ids.to(state.choice_counts.device)
    state.choice_counts[layer.index].scatter_add_(0, ids, torch.ones_like(ids))
