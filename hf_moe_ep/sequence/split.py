"""Split the sequences of a forward over ranks, and gather its outputs.

The model is a causal LM or a token classifier.

    before the model      SplitSequence checks that the ranks which share a sequence have the same
                          batch, and adds a `Slice` to the arguments
    model                 stock code computes masks and positions of whole sequences
    decoder layers        TakeSlice: the first layer slices the hidden states, and every layer
                          slices its other arguments with one entry per token. If the model keeps
                          inputs of layers, every layer slices its hidden states, GatherOutput
                          gathers its output, and SliceNorm slices the final norm's output
    mixers in layers      GatherArguments and SliceOutput (mixers.py) gather the slices for modules
                          that mix tokens without the attention interface
    loss                  split_loss shifts labels, slices them, and sums the losses of all slices;
                          split_token_loss does the same for a classifier, without the shift
    after the model       JoinLogits gathers the outputs if no loss is computed, or if they are
                          requested (`gather_logits`)

The `Slice` of a forward is passed as a keyword argument from the causal LM down to attention and
loss, so a layer that is recomputed in backward gets the slice of its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_moe_ep.sequence.mixer_arguments import describes_packing
from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.packed_rows import (
    check_described_documents,
    check_packed_flash,
    find_documents,
    find_text_positions,
    number_documents,
)
from hf_moe_ep.sequence.same_batch import check_same_batch, check_sizes
from hf_moe_ep.sequence.slice_arguments import LayerArguments
from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices, make_zigzag_order, sum_slices
from hf_moe_ep.state import ModelState, OfModel, PackageHook, StateHook
from hf_moe_ep.upstream.attention_interface import (
    model_builds_dense_masks,
    model_uses_flash_attention,
)
from hf_moe_ep.upstream.frameworks import how_to_keep_all_logits
from hf_moe_ep.upstream.models import (
    IGNORED_LABEL,
    asks_for,
    bind_forward,
    find_cache,
    find_tokens,
    is_fused_head,
)
from hf_moe_ep.upstream.replaced_forwards import is_computed_by_liger


@dataclass
class RunningSlice:
    """The slice of the current forward, for modules outside the decoder layers.

    Attributes:
        part: the slice; None while no forward runs that is split.
    """

    part: Slice | None = None


class SplitSequence(PackageHook):
    """Pre-forward hook of the model, which splits a forward in training mode or with labels.

    Every other forward is split only if it has `use_cache=False` and no `logits_to_keep`. A forward
    with a cache is never split, and neither are the forwards of `generate`. With `separates`, hooks
    of modules separate the documents of packed rows (`packed_rows.py`), also in a forward that is
    not split. `has_mixers` is True if some of these modules are mixers.
    """

    def __init__(
        self,
        state: ModelState,
        running: RunningSlice,
        *,
        separates: bool,
        has_mixers: bool,
        zigzag: bool = False,
    ) -> None:
        self.state, self.running = state, running
        self.separates, self.has_mixers, self.zigzag = separates, has_mixers, zigzag

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.state.meshes
        if meshes is None or meshes.ranks_per_batch == 1:
            return None
        self.running.part = None  # after Ctrl-C torch skips hooks, so `EndForward` has not run
        given = bind_forward(model, args, kwargs)
        keep = given.get("logits_to_keep", 0)
        selects_positions = isinstance(keep, Tensor) or bool(keep)
        always_split = model.training or given.get("labels") is not None
        split = always_split or (given.get("use_cache") is False and not selects_positions)
        if find_cache(given) is not None:
            return None
        if not split:
            return _with_documents(model, given, self.has_mixers) if self.separates else None
        if selects_positions:
            raise ValueError(
                f"logits_to_keep={keep} selects positions of the whole sequence, but with "
                f"{self.state.config.sequence_sizes} a forward in training or with labels is "
                f"split; {how_to_keep_all_logits()}"
            )
        name = "output_attentions"
        if asks_for(name, given, model.config):
            raise ValueError(
                f"{name}=True asks for the attention weights of all heads and tokens, but with "
                f"{self.state.config.sequence_sizes} a rank computes those of some of them; leave "
                f"it out, or run the model with sp_size=1 and cp_size=1"
            )
        tokens = find_tokens(given)
        if tokens is None:
            return None  # the model raises its own error
        group = meshes.sequence.get_group()
        routes = {}
        if self.state.routing is not None:
            routes = self.state.routing.tensors(tokens.device)
        check_same_batch(given | routes, tokens, group)
        check_sizes(given, tokens)
        if is_computed_by_liger(model) and given.get("labels") is not None:
            raise ValueError(
                f"Liger's fused linear cross-entropy cannot compute the loss of a slice, which "
                f"{self.state.config.sequence_sizes} needs; turn it off: liger_kernel_config="
                f"{{'fused_linear_cross_entropy': False}}"
            )
        order = make_zigzag_order(meshes.cp_size, meshes.sp_size) if self.zigzag else None
        rank, size = meshes.sequence.get_local_rank(), meshes.ranks_per_batch
        part = Slice(group, rank, size, length=tokens.shape[1], order=order)
        part.divide(meshes.sp, meshes.cp)
        given[SLICE] = part
        if is_fused_head(given):
            labels = given.get("labels") if given.get("shift_labels") is None else None
            given["shift_labels"] = _slice_next_labels(labels, given.get("shift_labels"), part)
            # TRL's head ignores `labels` now. JoinLogits reads them: they are None if the caller
            # has shifted the labels.
            given["labels"] = labels
        given["use_cache"] = False
        _check_axes(given, separates=self.separates)
        positions = given.get("position_ids")
        mask = given["attention_mask"] = _choose_mask(positions, given.get("attention_mask"))
        by_flash = model_uses_flash_attention(model)
        if self.separates or (by_flash and len(tokens) > 1):
            documents = _find_packed_documents(
                given, mask, tokens, by_flash=by_flash, has_mixers=self.has_mixers
            )
            part.documents = documents if self.separates else None
        self.running.part = part
        return (), given


class EndForward(PackageHook):
    """Forward hook that forgets the slice of the forward, also after an error."""

    def __init__(self, running: RunningSlice) -> None:
        self.running = running

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.running.part = None


class FindDocuments(PackageHook):
    """Pre-forward hook that finds packed documents in a model whose sequences are not split.

    A forward with packed rows gets a `Slice` of the whole sequence, so that mixers run once per
    document. If torch.compile traces the model, and it has no mixers, every forward with position
    ids gets a `Slice`, so that attention separates the documents. Other forwards do not change.
    """

    separates = True

    def __init__(self, *, has_mixers: bool) -> None:
        self.has_mixers = has_mixers

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = bind_forward(model, args, kwargs)
        is_packed = given.get("position_ids") is not None or describes_packing(given)
        if not is_packed or find_cache(given) is not None:
            return None
        if torch.compiler.is_compiling() and not self.has_mixers and _can_be_traced(model, given):
            return _with_document_numbers(given)
        return _with_documents(model, given, self.has_mixers)


def _can_be_traced(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return True if a traced forward can separate the documents in the dense masks of attention.

    FlexAttention has masks of blocks, and flash attention reads the documents itself. The caller
    must pass the positions of the text, and no mask or a mask (B, S).
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    return (
        isinstance(positions, Tensor)
        and find_text_positions(positions) is not None
        and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
        and find_tokens(given) is not None
        and not describes_packing(given)
        and model_builds_dense_masks(model)
    )


def _with_document_numbers(given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward that torch.compile traces, with a `Slice` for attention.

    A graph is the same for all positions, so attention gets a mask of documents even if the rows
    are not packed. A packed row may have padding here: its mask hides the padding in stock's mask,
    and the documents are separated in addition.
    """
    tokens, positions = find_tokens(given), find_text_positions(given["position_ids"])
    assert tokens is not None and positions is not None
    part = Slice(None, 0, 1, length=tokens.shape[1])
    part.document_numbers = number_documents(positions, given.get("attention_mask"))
    return (), given | {SLICE: part}


@torch.compiler.disable(
    reason="the packed documents of this model are found in the values of position_ids, which "
    "torch.compile cannot trace; leave out fullgraph or position_ids"
)
def _with_documents(
    model: nn.Module, given: dict[str, Any], has_mixers: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a forward with packed rows, or None if the rows are not packed.

    The forward gets no cache, because a mixer would begin each document with the state that the
    cache has from the previous document.
    """
    positions, tokens = given.get("position_ids"), find_tokens(given)
    if tokens is None:
        return None
    _check_axes(given, separates=True)
    mask = _choose_mask(positions, given.get("attention_mask"))
    by_flash = model_uses_flash_attention(model)
    documents = _find_packed_documents(
        given, mask, tokens, by_flash=by_flash, has_mixers=has_mixers
    )
    if documents is None:
        return None
    part = Slice(None, 0, 1, length=tokens.shape[1])
    part.documents = documents
    return (), given | {"attention_mask": mask, "use_cache": False, SLICE: part}


def _find_packed_documents(
    given: dict[str, Any], mask: Any, tokens: Tensor, *, by_flash: bool, has_mixers: bool
) -> list[list[tuple[int, int]]] | None:
    """Return the documents of packed rows, or None; `mask` is what `_choose_mask` has returned.

    Rows with a mask (B, S) are padded and not packed. A mask of the caller with another shape, such
    as (B, 1, S, S), may separate documents in attention, but not in mixers. With such a mask, or
    with flash attention, a document begins only where positions do not increase. Otherwise a
    document also begins after a gap between positions.

    Raises:
        ValueError: flash attention would mix the documents of several rows; or the positions lack
            documents that other arguments describe. Flash attention alone reads these arguments.
    """
    documents, is_padded = None, isinstance(mask, Tensor) and mask.ndim == 2
    if not is_padded:
        at_gaps = mask is None and not by_flash
        documents = find_documents(given.get("position_ids"), len(tokens), at_gaps=at_gaps)
    if has_mixers or not by_flash:
        check_described_documents(given, documents, tokens)
    if documents is not None and mask is None and by_flash:
        check_packed_flash(len(tokens))
    return documents


class PassDocuments(PackageHook):
    """Pre-forward hook of a decoder layer that passes the packed documents to its mixers.

    It is used in a model whose sequences are not split.
    """

    def __init__(self, layer: LayerSlice) -> None:
        self.layer = layer

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.layer.begin(layer, kwargs.get(SLICE))
        return args, {name: value for name, value in kwargs.items() if name != SLICE}


class JoinLogits(StateHook):
    """Forward hook of the model, which gathers the outputs.

    If the caller has passed labels, the outputs are dropped instead, unless `gather_logits` is set.
    """

    @torch.compiler.disable
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        part: Slice | None = kwargs.get(SLICE)
        if part is None or part.size == 1:
            return None
        if is_fused_head(kwargs):
            stock_length = part.length if kwargs.get("labels") is None else part.length - 1
            return _join_fused(output, part, stock_length)
        if isinstance(output, tuple):
            raise ValueError(
                f"return_dict=False is not supported with {self.state.config.sequence_sizes}; "
                f"leave it out"
            )
        gather_outputs = kwargs.get("labels") is None
        gather_outputs |= self.state.config.gather_logits or self.state.gather_logits
        # Outputs that are not gathered become None. A metric of a slice would silently be wrong.
        return replace(
            output,
            **{
                name: _join(output.get(name), part) if gather_outputs else None
                for name in ("logits", "hidden_states", "router_logits")
                if name in output
            },
        )


def _join(x: Any, part: Slice) -> Any:
    """Gather slices (B, S / N, X) of N ranks, flat slices (B * S / N, X), or tuples of both."""
    if not isinstance(x, Tensor):
        return None if x is None else tuple(_join(element, part) for element in x)
    if x.ndim == 3 and part.local_length < part.length == x.shape[1]:
        return x  # the outputs of layers whose model keeps their inputs
    flat = x.ndim == 2
    slices = x.unflatten(0, (-1, part.local_length)) if flat else x
    whole = gather_slices(slices, part)
    return whole.flatten(0, 1).clone() if flat else whole


class TakeSlice(PackageHook):
    """Pre-forward hook of a decoder layer, which slices the arguments with one entry per token.

    `slice_arguments.py` lists these arguments, such as position embeddings. Masks stay whole.
    `gets_whole` is True if the hidden states have all tokens and must be sliced, too.
    """

    def __init__(self, arguments: LayerArguments, layer: LayerSlice, *, gets_whole: bool) -> None:
        self.arguments, self.layer, self.gets_whole = arguments, layer, gets_whole

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        part: Slice | None = kwargs.get(SLICE)
        # The whole hidden states in args[0] are not kept alive, because no mixer looks for them.
        self.layer.begin(layer, part, (args[1:], kwargs))
        if part is None:
            return None
        if part.size == 1:  # packed rows of a forward that is not split
            return args, {name: value for name, value in kwargs.items() if name != SLICE}
        if not args:
            raise ValueError(
                f"{part.size} ranks slice the first argument of {type(layer).__name__}, but the "
                f"layer was called with keywords only; call it as layer(hidden_states, ...)"
            )
        part.positions = kwargs.get("position_ids")
        hidden, *other_arguments = self.arguments.slice_positional(args, part)
        if self.gets_whole:
            hidden = part.take(hidden, 1)
        return (hidden, *other_arguments), self.arguments.slice_named(kwargs, part)


class GatherOutput(PackageHook):
    """Forward hook of a decoder layer of a model that keeps inputs of layers; gathers its output.

    Between the layers every rank has the hidden states (B, S, H) of whole sequences, and computes
    the same results from them. In each layer a rank sends (sp - 1) * H values per token of its
    slice in forward, and as many in backward.
    """

    def __init__(self, layer: LayerSlice) -> None:
        self.layer = layer

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        part = self.layer.part
        return None if part is None else gather_slices(output, part)


class SliceNorm(OfModel):
    """Forward hook of the final norm of a model that keeps inputs of layers; slices its output."""

    def __init__(self, running: RunningSlice, root: nn.Module) -> None:
        super().__init__(root)
        self.running = running

    def __call__(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        part = self.running.part
        return None if part is None else part.take(output, 1)


def split_loss(
    stock: Callable[..., Tensor], logits: Tensor, labels: Tensor, *args: Any, **kw: Any
) -> Tensor:
    """Return the loss of the whole sequence, equal on all ranks, from this rank's logits.

    Backward multiplies the gradient of this rank's logits by the number of ranks that share the
    sequence (`sum_slices`). FSDP2 averages the gradients of parameters over all ranks, but the
    gradients of the slices of one sequence must be added.
    """
    part: Slice | None = kw.pop(SLICE, None)
    if part is None or part.size == 1:
        return stock(logits, labels, *args, **kw)
    shifted, ignored = kw.pop("shift_labels", None), kw.get("ignore_index", IGNORED_LABEL)
    count = _pop_count(kw)
    if count is None:
        counted = labels[:, 1:] if shifted is None else shifted
        count = (counted != ignored).sum()
    own_labels = _slice_next_labels(labels, shifted, part, ignored)
    loss = stock(logits, None, *args, shift_labels=own_labels, num_items_in_batch=count, **kw)
    return sum_slices(loss, part)


def split_token_loss(
    stock: Callable[..., Tensor],
    running: RunningSlice,
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """Return the loss of a token classifier for the whole sequence, as `split_loss` does.

    Labels are not shifted. The classifier passes no arguments of its forward on to its loss, so the
    slice comes from `running`.
    """
    part = running.part
    if part is None:
        return stock(logits, labels, *args, **kw)
    ignored = kw.get("ignore_index", IGNORED_LABEL)
    count = _pop_count(kw)
    if count is None:
        count = (labels != ignored).sum()
    own_labels = part.take(labels, 1, fill=ignored).contiguous()
    return sum_slices(stock(logits, own_labels, *args, num_items_in_batch=count, **kw), part)


def _pop_count(kw: dict[str, Any]) -> Tensor | int | None:
    """Take the number of labels from the arguments of a loss, as a scalar.

    Some callers pass a tensor of shape [1]. The loss of a slice would then also have this shape,
    and autograd would refuse the scalar gradient that `sum_slices` returns for the loss.
    """
    count: Tensor | int | None = kw.pop("num_items_in_batch", None)
    return count.squeeze() if isinstance(count, Tensor) else count


def _slice_next_labels(
    labels: Tensor | None, shifted: Tensor | None, part: Slice, ignored: int = IGNORED_LABEL
) -> Tensor:
    """Return the next label of each token of this rank's slice, padded with `ignored`."""
    if shifted is None:
        assert labels is not None
        shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    return part.take(shifted, 1, fill=ignored).contiguous()


def _join_fused(output: Any, part: Slice, length: int) -> Any:
    """Gather the outputs of TRL's fused head for `length` tokens, and drop the loss of the slice.

    As in TRL without sequence parallelism, `length` does not count the last token, which has no
    label, unless the caller has shifted the labels.
    """
    gathered = {
        name: _gather_numbers(x, part, length)
        for name, x in output.items()
        if isinstance(x, Tensor) and x.ndim == 2
    }
    return replace(output, **gathered, loss=None)


def _gather_numbers(x: Tensor, part: Slice, length: int) -> Tensor:
    """Gather slices (B, S / sp) of numbers or flags to (B, length)."""
    numbers = x.to(torch.uint8) if x.dtype == torch.bool else x
    gathered = gather_slices(numbers.unsqueeze(-1), part).squeeze(-1)[:, :length]
    # The result is a copy, because FSDP2 warns about an output that is a view.
    return gathered.to(x.dtype, copy=True)


def _choose_mask(positions: Tensor | None, mask: Any) -> Any:
    """Return the mask, or None if it is (B, S) and the positions restart within a row.

    If several documents are packed into one row, the positions restart at each document. With a
    mask, transformers would ignore the positions, and the documents would silently attend to each
    other (masking_utils.py, _preprocess_mask_arguments).
    """
    text = None if positions is None else find_text_positions(positions)
    if text is None or not isinstance(mask, Tensor) or mask.ndim != 2:
        return mask
    both_visible = (mask[:, 1:] * mask[:, :-1]).bool()
    is_restart = both_visible & (text.diff() <= 0)
    restarts, all_visible = torch.stack([is_restart.any(), mask.all()]).tolist()
    if restarts and not all_visible:
        raise ValueError(
            "position_ids restart within a row, which means packed documents, but the "
            "attention_mask has zeros, and with a mask stock code treats a row as one document; "
            "leave the mask out, and pad each row with a document whose labels are -100"
        )
    return None if restarts else mask


def _check_axes(given: dict[str, Any], *, separates: bool) -> None:
    """Raise ValueError if positions (3, B, S) of time, row and column restart within a row.

    Stock code finds documents only by the positions of the text. Positions (3, B, S) lack them, so
    stock code would mix the documents silently. Only the first token of a document has position 0
    on every axis, because a picture or video has larger positions than the text before it. A batch
    that describes its documents by lengths, or by a mask of queries and keys, is accepted if no
    hook has to separate documents.
    """
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or find_text_positions(positions) is not None:
        return
    visible = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if (describes_packing(given) or mask is not visible) and not separates:
        return
    restarts = (positions[..., 1:] == 0).all(0)
    if visible is not None:
        restarts = restarts & (visible[:, 1:] * visible[:, :-1]).bool()
    if restarts.any():
        raise ValueError(
            "position_ids (3, B, S) restart within a row, which means packed documents, but stock "
            "code separates documents only by the positions of the text; put these in front of "
            "the three axes, which makes position_ids (4, B, S), or pad each document to a row of "
            "its own"
        )


def check_packed_rows(
    model: nn.Module, given: dict[str, Any], hook: FindDocuments | SplitSequence
) -> None:
    """Raise ValueError, as a hook of this module does, for documents that cannot be separated."""
    _check_axes(given, separates=hook.separates)
    mask = _choose_mask(given.get("position_ids"), given.get("attention_mask"))
    tokens = find_tokens(given)
    if hook.separates and tokens is not None and describes_packing(given):
        by_flash = model_uses_flash_attention(model)
        _find_packed_documents(given, mask, tokens, by_flash=by_flash, has_mixers=hook.has_mixers)
