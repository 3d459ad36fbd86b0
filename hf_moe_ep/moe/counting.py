"""Count on the device how many tokens chose each expert.

    choice_counts[l, e]    how often layer l has chosen expert e for this rank's own tokens, in all
                           training forwards so far

Each rank counts its own tokens before they are dispatched, so the sum over all ranks contains every
token once (the ranks that share a sequence have different slices). Counting needs no host sync. The
counts only grow: each function that reads them stores the counts of its last reset
(`ModelState.count_baselines`, see `routing/counts.py`) and subtracts them.

A forward is counted if it leads to gradients: the model is in training mode, and gradients were
enabled when the model was called. A test in the layer would not be enough, because a reentrant
checkpoint disables gradients in its first run. If a layer runs while a backward runs, this is a
recompute, which is not counted a second time.

Padding tokens are not counted, even if the experts compute them (`padding.py`), so the counts are
the same with every layout of the ranks. Padding tokens are the tokens that a mask (B, S) hides, and
the tokens that fill up the slices of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.dispatcher import Planning
from hf_moe_ep.etp import count_whole
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, MoELayer, StateHook
from hf_moe_ep.upstream.autograd_modes import backward_is_running, hidden_from_modes
from hf_moe_ep.upstream.models import (
    bind_forward,
    find_base_model_prefix,
    find_cache,
    find_tokens,
)


class BeginCounting(StateHook):
    """Pre-forward hook of the root: records whether this forward leads to gradients."""

    def __call__(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self.state.leads_to_gradients = torch.is_grad_enabled()


class EndCounting(StateHook):
    """Forward hook of the root: clears the record of `BeginCounting`.

    A layer that is called outside of the root's forward is counted if gradients are enabled.
    """

    def __call__(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.state.leads_to_gradients = False


class FindCounted(StateHook):
    """Pre-forward hook of the model that gets a batch: finds the tokens that are counted.

    It runs after the hook that adds a `Slice`, so with sp_size > 1 it finds this rank's tokens.
    """

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.compiler.is_compiling():
            self._keep(kwargs)
        elif model.training:
            self._find(model, args, kwargs)

    @torch.compiler.disable
    def _find(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(bind_forward(model, args, kwargs))

    def _keep(self, given: dict[str, Any]) -> None:
        self.state.batch_is_known = find_tokens(given) is not None
        self.state.counted_tokens = find_counted_tokens(given)


class ForgetCounted(StateHook):
    """Forward hook of the same model: forgets the tokens that `FindCounted` has found.

    If layers are compiled, the tokens stay until the next forward: without these tokens, the
    recompute of a layer would need another graph than its first run.
    """

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.state.batch_is_known = False
        if self.state.counted_tokens is not None and self.state.is_counted is None:
            self.state.counted_tokens = None


class FindCountedOfDecoder(FindCounted):
    """Pre-forward hook of the decoder: finds the tokens if the model itself got no batch.

    TRL's distillation trainers call only the decoder (trl/trainer/distillation_trainer.py,
    `_get_last_hidden_state`).
    """

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.state.batch_is_known:
            super().__call__(decoder, args, kwargs)

    def _keep(self, given: dict[str, Any]) -> None:
        self.state.counted_tokens = find_counted_tokens(given)


class ForgetCountedOfDecoder(ForgetCounted):
    """Forward hook of the decoder: forgets the tokens that `FindCountedOfDecoder` has found."""

    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.state.batch_is_known:
            super().__call__(decoder, args, output)


def attach_counting(parts: Parts, state: ModelState) -> None:
    """Register the hooks that decide which tokens of which forwards are counted."""
    parts.root.register_forward_pre_hook(BeginCounting(state))
    parts.root.register_forward_hook(EndCounting(state), always_call=True)
    if parts.tied_modules:
        return  # the mask does not describe the tokens of the second tower's layers
    owners = (parts.causal_lm, parts.classifier, parts.root)
    model = next(module for module in owners if module is not None)
    model.register_forward_pre_hook(FindCounted(state), with_kwargs=True)
    model.register_forward_hook(ForgetCounted(state), always_call=True)
    if prefix := find_base_model_prefix(model):
        decoder = getattr(model, prefix)
        decoder.register_forward_pre_hook(FindCountedOfDecoder(state), with_kwargs=True)
        decoder.register_forward_hook(ForgetCountedOfDecoder(state), always_call=True)


def find_counted_tokens(given: dict[str, Any]) -> Tensor | None:
    """Return [T], int64: 1 for each of this rank's tokens that is counted, otherwise 0.

    The result is None if all tokens are counted. `given` has the arguments of the forward by name.
    """
    part: Slice | None = given.get(SLICE)
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or find_cache(given) is not None:
        tokens = find_tokens(given)
        if part is None or part.local_length * part.size == part.length or tokens is None:
            return None
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    counted_BS = mask != 0
    if part is not None:
        counted_BS = part.take(counted_BS, 1, fill=False)
    return counted_BS.flatten().long()  # the dtype of the counts, to which it is added


def count_choice(
    layer: MoELayer, training: bool, expert_ids_TK: Tensor, planning: Planning | None = None
) -> None:
    """Count the experts that `layer` chose for this rank's tokens, if this forward is counted.

    If the dispatcher has already counted the pairs for its exchange, `planning` has these counts.
    """
    state = layer.model
    if torch.compiler.is_compiling() and state.is_counted is not None:
        if training:
            counts, ids_TK = reserve_counts(state, expert_ids_TK.device), expert_ids_TK.detach()
            _count_compiled(
                counts, layer.index_tensor, ids_TK, state.is_counted, state.counted_tokens
            )
        return
    if not (training and (state.leads_to_gradients or torch.is_grad_enabled())):
        return
    if torch.compiler.is_compiling():
        # The recompute of a compiled checkpoint does not call this function again.
        _add_counts(layer, expert_ids_TK, None)
    elif not backward_is_running():
        # Selective checkpointing compares the operators of a layer's first run and of its
        # recompute, but only the first run counts tokens.
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
    # The dispatcher also counts padding tokens that it sends, because a loss may depend on them
    # (`padding.py`). Only the device knows if there are any, and reading this would be a host sync,
    # so the choices of a batch with a mask are counted one by one.
    if pairs_E is not None and state.counted_tokens is None:
        if state.meshes is not None and state.meshes.etp_size > 1:
            num_local = len(state.meshes.local_experts(state.num_experts))
            pairs_E = count_whole(pairs_E, num_local, state.meshes.etp_size)
        # The dispatcher knows experts by their slots.
        counts[layer.index] += (
            pairs_E if layer.slots_E is None else pairs_E[layer.slots_E.to(pairs_E.device)]
        )
        return
    _add_to_row(counts[layer.index], ids_TK, layer.may_choose_no_expert, state.counted_tokens)


def _add_to_row(
    counts_E: Tensor, expert_ids_TK: Tensor, may_choose_no_expert: bool, counted_T: Tensor | None
) -> None:
    """Add the expert ids of the tokens with `counted_T` = 1 to `counts_E`; None means all tokens.

    With `may_choose_no_expert`, an id that is not below the number of experts is not counted.
    """
    # In one process the layers of a model may be on several devices.
    ids = expert_ids_TK.flatten().long().to(counts_E.device)
    if counted_T is None or len(counted_T) != len(expert_ids_TK):
        ones = torch.ones_like(ids)
    else:
        ones = counted_T.to(ids.device).unsqueeze(1).expand(expert_ids_TK.shape).flatten()
    if may_choose_no_expert:
        ones, ids = ones.masked_fill(ids >= len(counts_E), 0), ids.clamp(max=len(counts_E) - 1)
    counts_E.scatter_add_(0, ids, ones)


@torch.library.custom_op("hf_moe_ep::count_choice", mutates_args=("choice_counts",))
def _count_compiled(
    choice_counts: Tensor,
    layer_index: Tensor,
    expert_ids: Tensor,
    is_counted: Tensor,
    counted_tokens: Tensor | None,
) -> None:
    """Count the choice of a layer that `compile_layers` has compiled.

    A graph calls this operator in the layer's first run and in its recompute, so the operator
    itself must detect a recompute. `layer_index` and `is_counted` are on the CPU.
    """
    if bool(is_counted) and not backward_is_running():
        _add_to_row(choice_counts[int(layer_index)], expert_ids, True, counted_tokens)


@_count_compiled.register_fake
def _(
    choice_counts: Tensor,
    layer_index: Tensor,
    expert_ids: Tensor,
    is_counted: Tensor,
    counted_tokens: Tensor | None,
) -> None:
    return None
