"""Register the hooks that compute the loss in chunks (`ParallelConfig.fused_loss`).

The forward of a causal LM with labels calls the head and then the loss function. `BeginFusedLoss`
replaces both for this forward, and `EndFusedLoss` restores them. In between:

    head             returns a copy of its input, the hidden states, instead of logits
    loss function    gets these hidden states as its logits, and computes head and loss in chunks
    outputs.logits   is None

The head is still called as a module, so FSDP2 gathers the parameters of the head before the call,
and registers a pre-backward hook on the hidden states that the head returns. FSDP2 does not reshard
the head after its forward, so the loss function can use the parameters. If another forward reshards
them before backward (`sharding/gathered.py`), the pre-backward hook gathers them again.

The code of the model's forward is read first (`upstream/causal_loss.py`). If the code has another
use of the logits, or if the model has another loss function, the forward runs as in stock. The same
holds if hooks of the user, or wrappers around the forward, may read or change the logits, or if a
hook on a parameter of the head would run twice, in `autograd.grad` and in backward.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from hf_moe_ep.architectures import Parts
from hf_moe_ep.loss.chunks import HeadLoss
from hf_moe_ep.state import (
    ModelState,
    PackageHook,
    Undo,
    find_state,
    replace_attribute,
    restore_attributes,
)
from hf_moe_ep.upstream.causal_loss import find_other_use_of_logits, is_causal_loss
from hf_moe_ep.upstream.models import (
    IGNORED_LABEL,
    bind_forward,
    get_output_head,
    is_fused_head,
)
from hf_moe_ep.upstream.modules import find_name_of_child, list_gradient_hooks, list_hooks_on_output
from hf_moe_ep.upstream.replaced_forwards import (
    find_foreign_wrapper,
    get_qualified_name,
    is_foreign,
)

_logger = logging.getLogger("hf_moe_ep")

# A chunk has half as many tokens as the hidden size. Its logits and their gradients then need about
# as much memory as the gradient of the head's weight, to which each chunk adds. With smaller chunks
# most of the time would be spent on reading and writing this gradient.
_TOKENS_PER_HIDDEN = 0.5
_SMALLEST_CHUNK = 256


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if `fused_loss=True` is not possible for this model."""
    if state.config.fused_loss is not True:
        return
    reason = _find_obstacle(parts)
    if reason:
        raise ValueError(
            f"fused_loss=True computes the loss without logits, which {type(parts.root).__name__} "
            f"({parts.plan.model_type}) does not allow: {reason}; leave fused_loss out"
        )


def attach(parts: Parts, state: ModelState) -> None:
    """Register the hooks on the causal LM, if its loss can be computed in chunks.

    The pre-forward hook decides for each forward whether its loss is computed in chunks
    (`BeginFusedLoss._are_logits_unused`).
    """
    if state.config.fused_loss is False or parts.causal_lm is None:
        return
    reason = _find_obstacle(parts)
    if reason:
        _logger.info(
            "the loss of %s is computed from whole logits: %s", type(parts.root).__name__, reason
        )
        return
    begin_hook = BeginFusedLoss(state)
    parts.causal_lm.register_forward_pre_hook(begin_hook, with_kwargs=True)
    parts.causal_lm.register_forward_hook(EndFusedLoss(begin_hook), always_call=True)


def _find_obstacle(parts: Parts) -> str:
    """Return the reason why the loss of a model cannot be computed in chunks, or ""."""
    if parts.causal_lm is None:
        return "it has no language modelling head"
    name = find_name_of_child(parts.causal_lm, parts.head)
    if name is None:
        return "its head is not a child of the model that computes the loss"
    if not has_causal_loss(parts.causal_lm):
        return "its loss function is not transformers' ForCausalLMLoss"
    other = find_other_use_of_logits(parts.causal_lm, name)
    return f"its forward uses the logits in `{other}`" if other else ""


def has_causal_loss(model: Any) -> bool:
    """Return True if the loss function of a causal LM is transformers' ForCausalLMLoss.

    In a patched model, `split_loss` (sequence/attach.py) may replace this function and call it.
    """
    loss, state = model.loss_function, find_state(model)
    if state is not None and state.has_replaced(model, "_loss_function"):
        loss = _unwrap_split_loss(loss)
    return is_causal_loss(loss)


def _unwrap_split_loss(loss: Any) -> Any:
    """Return `stock` if the loss is `partial(split_loss, stock)` (sequence/attach.py), or None."""
    is_split = isinstance(loss, partial) and len(loss.args) == 1
    return loss.args[0] if is_split else None


class BeginFusedLoss(PackageHook):
    """Pre-forward hook of the causal LM: decides whether the loss of this forward is fused.

    If a model is deep-copied after Ctrl-C has ended a forward, the hook and the functions that it
    has set are copied as well, so the hook of the copy restores the functions of the copy.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.forward: _Forward | None = None
        self._named_reader = ""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.end()  # after Ctrl-C torch has not called `EndFusedLoss`
        if self._are_logits_unused(model):
            self._begin(model, args, kwargs)

    def _are_logits_unused(self, model: nn.Module) -> bool:
        state, config = self.state, self.state.config
        if state.gather_logits or config.gather_logits:
            return False
        if state.stage is not None or (
            state.meshes is not None and state.meshes.ranks_per_batch > 1
        ):
            return True  # with these layouts a forward with labels never returns logits
        return state.only_loss_is_read or (config.fused_loss is True and model.training)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bind_forward(model, args, kwargs)
        keep = arguments.get("logits_to_keep", 0)
        if arguments.get("labels") is None or is_fused_head(arguments):
            return
        if arguments.get("return_dict") is False:
            return
        if isinstance(keep, Tensor) or keep:
            return
        # Adapters may have wrapped the head since `patch`, and Liger may have replaced the forward.
        head = get_output_head(model)
        name = find_name_of_child(model, head)
        if head is None or name is None or find_other_use_of_logits(model, name):
            return
        if reader := self._find_reader_of_logits(model, head):
            self._name_reader(model, reader)
            return
        # Ctrl-C may come at every line, so `self.forward` is set before the functions are replaced,
        # and `end` clears it after the functions are restored.
        self.forward = _Forward(model, head, self.state)
        self.state.loss_is_fused = self.forward.replace_functions()
        if not self.state.loss_is_fused:
            self.forward = None

    def _find_reader_of_logits(self, model: nn.Module, head: nn.Module) -> str:
        """Describe code of the user that may read or change logits and their gradients, or ""."""
        if wrapper := find_foreign_wrapper(model):
            return f"{wrapper}, which wraps its forward"
        is_explicit = self.state.config.fused_loss is True
        for hook in list_hooks_on_output(model):
            if is_explicit and isinstance(hook, EndFusedLoss):
                break  # `fused_loss=True` promises later hooks an output without logits.
            if is_foreign(hook):
                return f"{get_qualified_name(hook)}, a hook on its output"
        hooks = [*filter(is_foreign, list_hooks_on_output(head)), *list_gradient_hooks(head)]
        return f"{get_qualified_name(hooks[0])}, a hook of its head" if hooks else ""

    def _name_reader(self, model: nn.Module, reader: str) -> None:
        """Say once why logits are computed; warn if the user has asked for `fused_loss=True`."""
        if self._named_reader == reader:
            return
        self._named_reader = reader
        message = (
            f"the loss of {type(model).__name__} is computed from whole logits, because {reader}, "
            f"may read or change them"
        )
        if self.state.config.fused_loss is True:
            warnings.warn(f"{message}; remove it, or leave fused_loss out", stacklevel=2)
        else:
            _logger.info(message)

    def end_interrupted(self, module: nn.Module) -> None:
        """Restore the functions of the model now, instead of at the next forward."""
        self.end()

    def end(self) -> _Forward | None:
        """Restore the functions of the model, and return the forward that has ended, or None."""
        forward = self.forward
        if forward is not None:
            self.state.loss_is_fused = False
            restore_attributes(forward.undo)
            self.forward = None
        return forward


class EndFusedLoss(PackageHook):
    """Forward hook of the causal LM: restores its functions, and removes the output's logits."""

    def __init__(self, begin_hook: BeginFusedLoss) -> None:
        self.begin_hook = begin_hook

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.begin_hook.forward is None:
            return None
        forward = self.begin_hook.end()
        assert forward is not None
        if not forward.is_fused or output is None:  # None if the forward has raised an error
            return None
        return replace(output, logits=None)


class _Forward:
    """One forward whose loss is computed in chunks.

    Attributes:
        is_fused: True if the head has returned hidden states instead of logits.
        undo: the replaced attributes, with their stock values.
    """

    def __init__(self, model: Any, head: Any, state: ModelState) -> None:
        self.model, self.head, self.state = model, head, state
        self.stock_head: Callable[[Tensor], Tensor] = head.forward
        self.stock_loss: Callable[..., Tensor] = model.loss_function
        self.is_fused = False
        self.undo: Undo = []
        self._dtype = torch.float32

    def replace_functions(self) -> bool:
        """Replace head and loss function; return False if the loss is not transformers' own."""
        ours: Any = self.compute_loss
        if not is_causal_loss(self.stock_loss):
            split: Any = self.stock_loss
            self.stock_loss = _unwrap_split_loss(split)
            if not is_causal_loss(self.stock_loss):
                return False
            ours = partial(split.func, ours)
        replace_attribute(self.undo, self.head, "forward", self.return_hidden)
        replace_attribute(self.undo, self.model, "_loss_function", ours)
        return True

    def return_hidden(self, hidden_BSH: Tensor) -> Tensor:
        """Replacement of the head's forward: return hidden states instead of logits."""
        policy = self.state.policy
        output_dtype = None if policy is None else policy.output_dtype
        if output_dtype is not None and output_dtype.itemsize < hidden_BSH.dtype.itemsize:
            return self.stock_head(hidden_BSH)  # FSDP2 would round the hidden states
        self.is_fused, self._dtype = True, hidden_BSH.dtype
        # A clone, because FSDP2 warns about an output that is a view.
        return hidden_BSH.clone()

    def compute_loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute transformers' ForCausalLMLoss; `logits` are hidden states (B, S, H) here."""
        if not self.is_fused:
            return self.stock_loss(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        hidden_TH = logits.to(self._dtype).flatten(0, -2)
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        labels_T = shift_labels.reshape(-1).to(hidden_TH.device)
        if len(labels_T) != len(hidden_TH):
            raise ValueError(
                f"the model has computed {len(hidden_TH)} tokens, but was given "
                f"{len(labels_T)} labels"
            )
        if num_items_in_batch is None:
            num_items_in_batch = (labels_T != ignore_index).sum()
        if not isinstance(num_items_in_batch, Tensor):
            # `full` does not wait for the forward of the decoder, as a copy to the device would.
            num_items_in_batch = torch.full((), num_items_in_batch, device=hidden_TH.device)
        divisor = num_items_in_batch.to(hidden_TH.device)
        compiled = self.state.compiled_cross_entropy
        return HeadLoss(
            self.stock_head,
            self._gather_head,
            tuple(p for p in self.head.parameters() if p.requires_grad),
            labels_T,
            vocab_size,
            ignore_index,
            divisor.squeeze(),  # callers also pass the number in a tensor [1]
            max(_SMALLEST_CHUNK, int(_TOKENS_PER_HIDDEN * hidden_TH.shape[1])),
            None if compiled is None else compiled.run,
        ).compute(hidden_TH)

    def _gather_head(self) -> None:
        if isinstance(self.head, FSDPModule):
            self.head.unshard()
