"""Count on the device how many tokens chose each expert.

    choice_counts[l, e]    how often layer l has chosen expert e for this rank's own tokens, in all
                           training forwards so far

Each rank counts its own tokens before they are dispatched, so the sum over all ranks contains every
token once (the ranks that share a sequence have different slices). Counting needs no host sync. The
counts only grow: each function that reads them stores the counts of its last reset
(`ModelState.count_baselines`, see `routing/counts.py`) and subtracts them.

A forward is counted if it leads to gradients: the model is in training mode, and gradients were
enabled when the model was called. A test in the layer would not be enough, because a reentrant
checkpoint disables gradients in its first run. A layer that runs while a backward runs is a
recompute, which is not counted a second time.

Padding tokens that the experts do not compute (`padding.py`) are not counted either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.dispatcher import Planning
from hf_moe_ep.etp import count_whole
from hf_moe_ep.state import ModelState, MoELayer, Ours
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes


class BeginCounting(Ours):
    """Pre-forward hook of the root: records whether this forward leads to gradients."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.leads_to_gradients = torch.is_grad_enabled()


class EndCounting(Ours):
    """Forward hook of the root: clears the record of `BeginCounting`.

    A layer that is called outside of the root's forward is counted if it has gradients enabled.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.state.leads_to_gradients = False


def count_choice(
    layer: MoELayer, training: bool, expert_ids_TK: Tensor, planning: Planning | None = None
) -> None:
    """Count the experts that `layer` chose for this rank's tokens, if this forward is counted.

    A dispatcher that has counted the pairs for its exchange has them in `planning`.
    """
    state = layer.model
    if torch.compiler.is_compiling() and state.is_counted is not None:
        if training:
            counts, ids_TK = reserve_counts(state, expert_ids_TK.device), expert_ids_TK.detach()
            _count_compiled(counts, layer.index_tensor, ids_TK, state.is_counted)
        return
    if not (training and (state.leads_to_gradients or torch.is_grad_enabled())):
        return
    if torch.compiler.is_compiling():
        # The recompute of a compiled checkpoint does not call this function again.
        _add_counts(layer, expert_ids_TK, None)
    elif not backward_is_running():
        # Selective checkpointing compares the operators of both runs, but only the first run counts
        # tokens.
        with hidden_from_modes():
            _add_counts(layer, expert_ids_TK, None if planning is None else planning.pairs_E)


def reserve_counts(state: ModelState, device: torch.device) -> Tensor:
    """Return `choice_counts`, and create it on `device` if it does not exist yet."""
    if state.choice_counts is None:
        shape = (len(state.moe_layers), state.num_experts)
        state.choice_counts = torch.zeros(shape, dtype=torch.int64, device=device)
    return state.choice_counts


def _add_counts(layer: MoELayer, expert_ids_TK: Tensor, pairs_E: Tensor | None) -> None:
    state, ids_TK = layer.model, expert_ids_TK.detach()
    counts = reserve_counts(state, ids_TK.device)
    if layer.index == 0 and counts.device != ids_TK.device:
        counts = state.choice_counts = counts.to(ids_TK.device)
    if pairs_E is not None:
        if state.meshes is not None and state.meshes.etp_size > 1:
            num_local = state.num_experts // state.meshes.ep_size
            pairs_E = count_whole(pairs_E, num_local, state.meshes.etp_size)
        # The dispatcher knows experts by their slots.
        counts[layer.index] += (
            pairs_E if layer.placement is None else pairs_E[layer.placement.to(pairs_E.device)]
        )
        return
    _add_to_row(counts[layer.index], ids_TK, layer.chooses_none)


def _add_to_row(counts_E: Tensor, expert_ids_TK: Tensor, chooses_none: bool) -> None:
    """Count expert ids. If `chooses_none`, the number of experts is an id that is not counted."""
    # In one process the layers of a model may be on several devices.
    ids = expert_ids_TK.flatten().long().to(counts_E.device)
    ones = torch.ones_like(ids)
    if chooses_none:
        ones, ids = ones.masked_fill(ids >= len(counts_E), 0), ids.clamp(max=len(counts_E) - 1)
    counts_E.scatter_add_(0, ids, ones)


@torch.library.custom_op("hf_moe_ep::count_choice", mutates_args=("choice_counts",))
def _count_compiled(
    choice_counts: Tensor, layer_index: Tensor, expert_ids: Tensor, is_counted: Tensor
) -> None:
    """Count the choice of a layer that `compile_layers` has compiled.

    A graph calls this operator in the layer's first run and in its recompute alike, so the operator
    itself finds out which of them is running. `layer_index` and `is_counted` are on the CPU.
    """
    if bool(is_counted) and not backward_is_running():
        _add_to_row(choice_counts[int(layer_index)], expert_ids, chooses_none=True)


@_count_compiled.register_fake
def _(choice_counts: Tensor, layer_index: Tensor, expert_ids: Tensor, is_counted: Tensor) -> None:
    return None
