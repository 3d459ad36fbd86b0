"""Find the padding tokens of a forward, which are neither dispatched nor computed by experts.

A batch of texts of different lengths is padded, and the attention mask is 0 at padding tokens. With
ep_size > 1 these tokens are sent to no rank, and the routed experts add nothing to them:

    attention_mask    1  1  1  0  0        the tokens 3 and 4 are padding
    labels            a  b  c  -  -        - stands for -100
    next label        b  c  -  -  -

The loss and the gradients stay exact, because nothing that the loss reads depends on a padding
token: attention masks it, and its own next label is ignored. If a loss could read one, the tokens
of its whole row are dispatched (the padding tokens of a row may see each other). This is so if

- the next label of a padding token is not ignored: the last padding token on the left of a text
  predicts the text's first token, unless the label of that token is -100;
- the forward has no labels, so another loss may read any output;
- modules other than attention mix the tokens of a sequence (`ModelPlan.mixers`).

A recompute must dispatch the tokens of the first run. A frame (`recompute.py`) stores its
exchanges. A checkpoint without a frame would not know the padding any more, so nothing is left out
inside of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.architectures import Parts
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.autograd_modes import saved_tensors_are_hooked
from hf_moe_ep.upstream.models import IGNORED_LABEL, bind_forward, given_cache


class PaddingBegins(Ours):
    """Pre-forward hook of the causal LM: finds the tokens that are not padding.

    It runs after the hook that adds a `Slice`, so with sp_size > 1 it keeps this rank's tokens.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and self.state.meshes is not None:
            self._find(model, args, kwargs)

    @torch.compiler.disable
    def _find(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.state.real_tokens = find_real_tokens(bind_forward(model, args, kwargs))


class PaddingEnds(Ours):
    """Forward hook of the causal LM: forgets the tokens that `PaddingBegins` has found."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.state.real_tokens is not None:
            self.state.real_tokens = None


def attach_padding(parts: Parts, state: ModelState) -> None:
    """Register the hooks with ep_size > 1, unless padding tokens may change other tokens."""
    if state.config.ep_size in (None, 1) or parts.causal_lm is None:
        return
    if parts.plan.mixers or not parts.attention:
        return
    parts.causal_lm.register_forward_pre_hook(PaddingBegins(state), with_kwargs=True)
    parts.causal_lm.register_forward_hook(PaddingEnds(state), always_call=True)


def find_real_tokens(given: dict[str, Any]) -> Tensor | None:
    """Return a mask [T] of the tokens that the experts have to compute, without a host sync.

    `given` are the arguments of the causal LM by name. The result is None if these are all tokens
    of every batch with such arguments.
    """
    mask, shifted, labels = (
        given.get(name) for name in ("attention_mask", "shift_labels", "labels")
    )
    if not isinstance(mask, Tensor) or mask.ndim != 2 or given_cache(given) is not None:
        return None
    ignored = given.get("ignore_index", IGNORED_LABEL)
    if shifted is None and isinstance(labels, Tensor) and labels.shape == mask.shape:
        shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    if not isinstance(shifted, Tensor) or shifted.shape != mask.shape:
        return None
    real_BS = mask != 0
    is_read_BS = ~real_BS & (shifted != ignored).to(mask.device)
    keep_BS = real_BS | is_read_BS.any(1, keepdim=True)
    part: Slice | None = given.get(SLICE)
    if part is not None:
        keep_BS = part.take(keep_BS, 1, fill=False)
    return keep_BS.flatten()


def leave_out_padding(state: ModelState, slots_TK: Tensor) -> Tensor:
    """Replace the slots of padding tokens by the number of experts, which means "no expert"."""
    real_T = state.real_tokens
    if real_T is None or len(real_T) != len(slots_TK) or _is_in_other_checkpoint(state):
        return slots_TK
    return slots_TK.masked_fill(~real_T.to(slots_TK.device).unsqueeze(1), state.num_experts)


def _is_in_other_checkpoint(state: ModelState) -> bool:
    """Return True inside of a checkpoint without a frame.

    The result is also True inside of another function that keeps the tensors that autograd saves.
    """
    if state.frame is not None:
        return False
    is_reentrant = state.leads_to_gradients and not torch.is_grad_enabled()
    return is_reentrant or saved_tensors_are_hooked()
