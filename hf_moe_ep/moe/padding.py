"""Find the padding tokens of a forward, which are neither dispatched nor computed by experts.

A batch of texts of different lengths is padded, and the attention mask is 0 at padding tokens. In
training these tokens are sent to no rank, and the routed experts add nothing to them:

    attention_mask    1  1  1  0  0        the tokens 3 and 4 are padding
    labels            a  b  c  -  -        - stands for -100
    next label        b  c  -  -  -

The loss and the gradients stay exact, because the loss does not depend on a padding token:
attention masks the token, and its own next label is ignored. If a loss may depend on a padding
token, all tokens of this row are dispatched (the padding tokens of a row may see each other). A
loss may depend on a padding token if

- the next label of a padding token is not ignored: the last padding token on the left of a text
  predicts the text's first token, unless the label of this first token is -100;
- the forward has no labels, so another loss may read the output of every token;
- modules other than attention mix the tokens of a sequence (`ModelPlan.mixers`), and padding stands
  before a text. Padding after a text does not matter, because all modules of a causal LM are
  causal.

The recompute of a checkpointed layer must leave out the same tokens as its first run, so
`CheckpointedTokens` (`recompute.py`) stores the mask. Inside a checkpoint of another kind no token
is left out.

With ep_size 1 a model's outputs at padding tokens equal stock's outputs as well, so padding is left
out only if these outputs are not returned:

- with a fused loss (`loss/attach.py`), which computes no logits, in a forward that returns no
  hidden states, router logits or attentions;
- with pipeline stages, whose training step returns no outputs of tokens.

The experts then get only the rows of the other tokens. The host must know the number of these rows,
which is one host sync per forward. torch.compile cannot trace this sync, so compiled blocks compute
all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.architectures import Parts
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, PackageHook, StateHook
from hf_moe_ep.upstream.autograd_modes import saved_tensors_are_hooked
from hf_moe_ep.upstream.models import IGNORED_LABEL, asks_for, bind_forward, find_cache


@dataclass
class RealTokens:
    """The tokens of one forward that the experts have to compute.

    Attributes:
        mask_T: True for these tokens.
        is_kept: True inside of a checkpoint that keeps this object for the recompute.
    """

    mask_T: Tensor
    is_kept: bool = False
    # Lists of at most one tensor, so that a copy of this object shares what was computed.
    _positions: list[Tensor | None] = field(default_factory=list)
    _padding: list[Tensor] = field(default_factory=list)

    def padding_T1(self, device: torch.device) -> Tensor:
        """Return a mask [T, 1] of all other tokens. The mask is computed once per forward."""
        if not self._padding or self._padding[0].device != device:
            self._padding[:] = [(~self.mask_T).to(device).unsqueeze(1)]
        return self._padding[0]

    def positions(self) -> Tensor | None:
        """Return the positions of these tokens; None if no token of the forward is padding.

        The first call is a host sync.
        """
        if not self._positions:
            found = self.mask_T.nonzero().squeeze(1)
            self._positions.append(None if len(found) == len(self.mask_T) else found)
        return self._positions[0]


class FindPadding(PackageHook):
    """Pre-forward hook of the causal LM: finds the tokens that are not padding.

    It runs after the hook that adds a `Slice`, so with sp_size > 1 it keeps this rank's tokens.
    """

    def __init__(self, state: ModelState, *, has_mixers: bool) -> None:
        self.state, self.has_mixers = state, has_mixers

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # After Ctrl-C torch skips forward hooks, so `ForgetPadding` has not run.
        self.state.real_tokens = None
        if model.training:
            self._find(model, args, kwargs)

    @torch.compiler.disable
    def _find(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = bind_forward(model, args, kwargs)
        if not self.state.exchanges_rows and self._returns_token_outputs(model, given):
            return
        mask_T = find_real_tokens(given, has_mixers=self.has_mixers)
        self.state.real_tokens = None if mask_T is None else RealTokens(mask_T)

    def _returns_token_outputs(self, model: Any, given: dict[str, Any]) -> bool:
        """Return True if the caller may read an output at a padding token."""
        options = [f"output_{name}" for name in ("hidden_states", "router_logits", "attentions")]
        requested = [name for name in options if asks_for(name, given, model.config)]
        if self.state.stage is not None:
            # All pipeline stages must decide alike, and only the last stage fuses the loss.
            reads_logits = self.state.gather_logits or self.state.config.gather_logits
            reads_logits |= self.state.caller_loss is not None
            return reads_logits or options[0] in requested
        return not self.state.loss_is_fused or (
            bool(requested) and not self.state.only_loss_is_read
        )


class ForgetPadding(StateHook):
    """Forward hook of the causal LM: clears the tokens that `FindPadding` has found."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.state.real_tokens is not None:
            self.state.real_tokens = None


def attach_padding(parts: Parts, state: ModelState) -> None:
    """Register the hooks on a causal LM with attention.

    A model with two towers gets no hooks, because the mask does not describe the tokens of the
    second tower.
    """
    if parts.causal_lm is None or not parts.attention or parts.tied_modules:
        return
    find_padding = FindPadding(state, has_mixers=bool(parts.plan.mixers))
    parts.causal_lm.register_forward_pre_hook(find_padding, with_kwargs=True)
    parts.causal_lm.register_forward_hook(ForgetPadding(state), always_call=True)


def find_real_tokens(given: dict[str, Any], *, has_mixers: bool = False) -> Tensor | None:
    """Return a mask [T] of the tokens that the experts have to compute, without a host sync.

    Args:
        given: the arguments of the causal LM by name.
        has_mixers: True if modules other than attention mix the tokens of a sequence.

    Returns:
        The mask, or None if these arguments do not show which tokens can be left out.
    """
    mask, shifted, labels = (
        given.get(name) for name in ("attention_mask", "shift_labels", "labels")
    )
    if not isinstance(mask, Tensor) or mask.ndim != 2 or find_cache(given) is not None:
        return None
    ignored = given.get("ignore_index", IGNORED_LABEL)
    if shifted is None and isinstance(labels, Tensor) and labels.shape == mask.shape:
        shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    if not isinstance(shifted, Tensor) or shifted.shape != mask.shape:
        return None
    real_BS = mask != 0
    is_read_BS = ~real_BS & (shifted != ignored).to(mask.device)
    if has_mixers:
        is_read_BS[:, :-1] |= ~real_BS[:, :-1] & real_BS[:, 1:]
    keep_BS = real_BS | is_read_BS.any(1, keepdim=True)
    part: Slice | None = given.get(SLICE)
    if part is not None:
        keep_BS = part.take(keep_BS, 1, fill=False)
    return keep_BS.flatten()


def leave_out_padding(state: ModelState, slots_TK: Tensor) -> Tensor:
    """Replace the slots of padding tokens by the number of experts, which means "no expert"."""
    real = _find_known_tokens(state, len(slots_TK))
    if real is None:
        return slots_TK
    return slots_TK.masked_fill(real.padding_T1(slots_TK.device), state.num_experts)


def find_positions_without_padding(state: ModelState, x_TH: Tensor) -> Tensor | None:
    """Return the positions of the tokens to compute; None if all tokens are computed."""
    real = _find_known_tokens(state, len(x_TH))
    positions = None if real is None else real.positions()
    return None if positions is None else positions.to(x_TH.device)


def _find_known_tokens(state: ModelState, num_tokens: int) -> RealTokens | None:
    """Return the real tokens of the current forward, if they are known; otherwise None.

    They are not known if their mask has not `num_tokens` elements, inside of a checkpoint that does
    not keep them, or under other hooks on the tensors that autograd saves.
    """
    real: RealTokens | None = state.real_tokens
    if real is None or len(real.mask_T) != num_tokens:
        return None
    if not real.is_kept:
        is_reentrant = state.leads_to_gradients and not torch.is_grad_enabled()
        if is_reentrant or saved_tensors_are_hooked():
            return None
    return real
