"""Split a forward into slices of its sequence, and join its outputs.

    before the causal LM  SplitSequence: all ranks have the same batch. A `Slice` is passed down
                          with it; masks and positions are computed for the whole sequence
    decoder layers        TakeSlice: the first layer slices the hidden states, and every layer its
                          other arguments with one entry per token
    loss                  split_loss: labels are shifted, then sliced; the losses of all slices are
                          summed
    after the causal LM   JoinLogits: gather the outputs, if no loss was asked for

The `Slice` of a forward is a keyword argument from the causal LM down to attention and loss, so a
layer that is recomputed in backward gets the slice of its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.sequence.layer_arguments import LayerArguments
from hf_moe_ep.sequence.same_batch import check_same_batch
from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices, sum_slices
from hf_moe_ep.state import ModelState, Ours
from hf_moe_ep.upstream.models import IGNORED_LABEL, bind_forward, given_cache, is_fused_head
from hf_moe_ep.upstream.replaced_forwards import is_computed_by_liger


class SplitSequence(Ours):
    """Pre-forward hook of the causal LM: decide if this forward is split.

    A forward is split in training mode or with labels. Any other forward is split only with
    `use_cache=False` and without `logits_to_keep`; so the forwards of `generate` are not split.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.state.meshes
        if meshes is None or meshes.sp_size == 1:
            return None
        given = bind_forward(model, args, kwargs)
        keep = given.get("logits_to_keep", 0)
        picks = isinstance(keep, Tensor) or bool(keep)
        learns = model.training or given.get("labels") is not None
        split = learns or (given.get("use_cache") is False and not picks)
        if given_cache(given) is not None or not split:
            return None
        if picks:
            raise ValueError(
                f"logits_to_keep={keep} selects positions of the whole sequence, but with sp_size="
                f"{meshes.sp_size} a forward in training or with labels is split; leave it out"
            )
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        tokens: Tensor = given[name]
        group = meshes.sp.get_group()
        routes = {}
        if self.state.routing is not None:
            routes = self.state.routing.tensors(tokens.device)
        check_same_batch(given | routes, tokens, group)
        rank = meshes.sp.get_local_rank()
        if is_computed_by_liger(model) and given.get("labels") is not None:
            raise ValueError(
                f"Liger's fused linear cross-entropy cannot compute the loss of a slice, which "
                f"sp_size={meshes.sp_size} needs; turn it off: liger_kernel_config="
                f"{{'fused_linear_cross_entropy': False}}"
            )
        part = Slice(group, rank, meshes.sp_size, length=tokens.shape[1])
        given[SLICE] = part
        if is_fused_head(given):
            whole = given.get("labels") if given.get("shift_labels") is None else None
            given["shift_labels"] = _next_labels(whole, given.get("shift_labels"), part)
            # TRL's head no longer reads `labels`; JoinLogits reads how the labels were given.
            given["labels"] = whole
        given["use_cache"] = False
        given["attention_mask"] = _mask_to_pass(
            given.get("position_ids"), given.get("attention_mask")
        )
        return (), given


class JoinLogits(Ours):
    """Forward hook of the causal LM: gather the outputs, or drop them if there is a loss."""

    def __init__(self, state: ModelState) -> None:
        self.state = state

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        part: Slice | None = kwargs.get(SLICE)
        if part is None:
            return None
        if is_fused_head(kwargs):
            as_stock = part.length if kwargs.get("labels") is None else part.length - 1
            return _join_fused(output, part, as_stock)
        if isinstance(output, tuple):
            raise ValueError("return_dict=False is not supported with sp_size > 1; leave it out")
        whole = kwargs.get("labels") is None
        whole |= self.state.config.gather_logits or self.state.gather_logits
        # None instead of a slice, from which a metric would silently be wrong.
        return replace(
            output,
            **{
                name: _join(output.get(name), part) if whole else None
                for name in ("logits", "hidden_states", "attentions", "router_logits")
                if name in output
            },
        )


def _join(x: Any, part: Slice) -> Any:
    """Gather slices (B, S / sp, V), flat slices (B * S / sp, V), or tuples of either."""
    if not isinstance(x, Tensor):
        return None if x is None else tuple(_join(one, part) for one in x)
    flat = x.ndim == 2
    slices = x.unflatten(0, (-1, part.local)) if flat else x
    whole = gather_slices(slices, part)
    return whole.flatten(0, 1).clone() if flat else whole


class TakeSlice(Ours):
    """Pre-forward hook of a decoder layer: slice its arguments with one entry per token.

    These are position embeddings and ids, inputs of this layer, and scales of queries. Masks stay
    whole. `layer_arguments.py` lists all of them.
    """

    def __init__(self, arguments: LayerArguments, *, first: bool) -> None:
        self.arguments, self.first = arguments, first

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        if part is None:
            return None
        if not args:
            raise ValueError(
                f"sp_size={part.size} slices the first argument of {type(layer).__name__}, which "
                f"was called with keywords alone; call it as layer(hidden_states, ...)"
            )
        part.positions = kwargs.get("position_ids")
        hidden, *others = self.arguments.slice_positional(args, part)
        if self.first:
            hidden = part.take(hidden, 1)
        return (hidden, *others), self.arguments.slice_named(kwargs, part)


def split_loss(
    stock: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """Return the loss of the whole sequence, the same on all ranks, from this rank's logits.

    Its gradient on one rank is sp times that of the loss, because FSDP2 averages gradients over all
    ranks, as in data parallelism.
    """
    part: Slice | None = kw.pop(SLICE, None)
    if part is None:
        return stock(logits, labels, *args, **kw)
    shifted, count = kw.pop("shift_labels", None), kw.pop("num_items_in_batch", None)
    ignored = kw.get("ignore_index", IGNORED_LABEL)
    if count is None:
        counted = labels[:, 1:] if shifted is None else shifted
        count = (counted != ignored).sum()
    mine = _next_labels(labels, shifted, part, ignored)
    loss = stock(logits, None, *args, shift_labels=mine, num_items_in_batch=count, **kw)
    return sum_slices(loss, part)


def _next_labels(
    labels: Tensor | None, shifted: Tensor | None, part: Slice, ignored: int = IGNORED_LABEL
) -> Tensor:
    """Return the next label of each token of this rank's slice, padded with `ignored`."""
    if shifted is None:
        assert labels is not None
        shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    return part.take(shifted, 1, fill=ignored).contiguous()


def _join_fused(output: Any, part: Slice, length: int) -> Any:
    """Gather the outputs of TRL's fused head for `length` tokens, and drop its loss of a slice.

    `length` excludes the last token, which has no label, unless the labels were already shifted: so
    TRL does without sp.
    """
    whole = {
        name: _gather_numbers(x, part, length)
        for name, x in output.items()
        if isinstance(x, Tensor) and x.ndim == 2
    }
    return replace(output, **whole, loss=None)


def _gather_numbers(x: Tensor, part: Slice, length: int) -> Tensor:
    """Gather (B, S / sp) to (B, length)."""
    numbers = x.to(torch.uint8) if x.dtype == torch.bool else x
    whole = gather_slices(numbers.unsqueeze(-1), part).squeeze(-1)[:, :length]
    # A copy, because FSDP2 warns about an output that is a view.
    return whole.to(x.dtype, copy=True)


def _mask_to_pass(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None if the positions restart within a row.

    Positions that restart separate documents packed into one row. But transformers ignores them if
    it also gets a mask, and the documents would silently attend to each other (masking_utils.py,
    _preprocess_mask_arguments).
    """
    if positions is None or mask is None or mask.ndim != 2:
        return mask
    if positions.ndim == 3:
        if positions.shape[0] != 4:  # (time, row, column) of pictures; no position of the text
            return mask
        positions = positions[0]
    both = (mask[:, 1:] * mask[:, :-1]).bool()
    restarts, whole = torch.stack([(both & (positions.diff() <= 0)).any(), mask.all()]).tolist()
    if restarts and not whole:
        raise ValueError(
            "position_ids restart within a row, which means packed documents, but the "
            "attention_mask has zeros, and with a mask stock code treats a row as one document; "
            "leave the mask out and fill up rows with a document whose labels are -100"
        )
    return None if restarts else mask
