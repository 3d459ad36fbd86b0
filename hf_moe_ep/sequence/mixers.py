"""Run mixers on whole sequences: gather the slices, run the stock module, slice its output.

A mixer is a module that mixes the tokens of a sequence without transformers' attention interface,
such as a delta net, a Mamba block, a short convolution or an indexer. The direct child of a decoder
layer that is or contains a mixer gets whole sequences. With 2 ranks and 8 tokens:

    rank 0   tokens 0-3  |  tokens 0-7, all heads and channels  |  tokens 0-3
    rank 1   tokens 4-7  |  tokens 0-7, all heads and channels  |  tokens 4-7
             all-gather     stock code                             slice

This works for every module, but it does not divide the computation and the activations of the mixer
by sp. With hidden size H, every rank sends (sp - 1) * H values per token of its slice in forward,
and as many gradients in backward. Arguments that `TakeSlice` has sliced, such as position
embeddings, are not sent, because every rank still has the whole tensors. The gradients of the
mixer's parameters need no extra collective: each rank computes the part that comes from its slice
of the output, and FSDP2 adds up the gradients of all ranks.

Some mixers are divided over the ranks instead. An attention module with an indexer keeps its slice
of the queries, and gathers only its keys (gathering_cache.py). The recurrence of a delta net or of
a state space model is split by heads, and a convolution gets only the last tokens before the slice
(recurrences.py).

For packed rows, a mixer runs once per document (packed_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.sequence.gathering_cache import GatheringCache
from hf_moe_ep.sequence.mixer_arguments import Call, Document, MixerArguments, describes_packing
from hf_moe_ep.sequence.slices import SLICE, Slice, gather_slices
from hf_moe_ep.state import PackageHook
from hf_moe_ep.upstream.models import CACHE_NAMES, get_compress_rate
from hf_moe_ep.upstream.modules import CheckpointedFunction
from hf_moe_ep.upstream.recurrences import get_convolution_width

# The attribute of a layer that holds its function for activation checkpointing
# (modeling_layers.py).
_CHECKPOINT = "_gradient_checkpointing_func"


@dataclass
class LayerSlice:
    """The slice that a decoder layer computes, for the hooks of the mixers in this layer.

    A layer does not pass its keyword arguments on to all its children. A pre-forward hook of the
    layer therefore calls `begin`. `EndLayer` calls `end`, which frees the masks of whole sequences
    to which the slice refers. Newer versions of transformers checkpoint the forward of a layer
    without its hooks. `begin` then wraps the checkpointing function, so that each recompute sets
    the slice of its own forward.

    Attributes:
        part: the slice, while the layer runs.
        given: the arguments of the layer before they were sliced. This attribute keeps the whole
            tensors alive, for mixers that get whole sequences.
        other_documents: for packed rows, the calls of a mixer for the second and later documents.
    """

    part: Slice | None = None
    given: Call | None = None
    other_documents: list[Call] = field(default_factory=list)

    def begin(self, layer: nn.Module, part: Slice | None, given: Call | None = None) -> None:
        """Set the slice of this forward, also for its recompute in backward."""
        self.part, self.given = part, given
        checkpoint = vars(layer).get(_CHECKPOINT)
        if part is None or checkpoint is None or torch.compiler.is_compiling():
            return
        if _find_own_checkpoint(layer) is None:
            setattr(layer, _CHECKPOINT, partial(_checkpoint_slice, self, checkpoint))

    def end(self, layer: nn.Module) -> None:
        """Forget the slice, and restore the function that checkpoints the layer.

        In a model that is compiled as a whole, `begin` has not wrapped the function, so recomputes
        read `part`. This method then leaves `part` set until the next forward.
        """
        if torch.compiler.is_compiling():
            return
        self.part, self.given, self.other_documents = None, None, []
        own = _find_own_checkpoint(layer)
        if own is not None:
            setattr(layer, _CHECKPOINT, own.args[1])


def _find_own_checkpoint(layer: nn.Module) -> partial[Any] | None:
    """Return the wrapper that `begin` has set around a layer's checkpointing function, or None."""
    checkpoint = vars(layer).get(_CHECKPOINT)
    is_own = isinstance(checkpoint, partial) and checkpoint.func is _checkpoint_slice
    return checkpoint if is_own else None


def _checkpoint_slice(
    layer: LayerSlice,
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Checkpoint `function`, so that its recompute gets the slice of this call."""
    return checkpoint(_WithSlice(layer, function), *args, **kwargs)


class _WithSlice(CheckpointedFunction):
    """Wraps a checkpointed function. Each recompute runs with the slice of the first run."""

    def __init__(self, layer: LayerSlice, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._layer, self._part = layer, layer.part
        self._given = layer.given  # keeps whole tensors alive until the backward of the layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        outer, layer.part = layer.part, self._part
        try:
            return self._function(*args, **kwargs)
        finally:
            layer.part, layer.other_documents = outer, []


class EndLayer(PackageHook):
    """Forward hook of a decoder layer that forgets its slice, also after an error."""

    def __init__(self, layer: LayerSlice) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.layer.end(module)

    def end_interrupted(self, module: nn.Module) -> None:
        """Restore the function that checkpoints the layer."""
        self.layer.end(module)


class MixerSplit(Enum):
    """How a mixer is divided over the ranks of an sp group.

    WHOLE: the mixer gets whole sequences, so it is not divided.
    QUERIES: the mixer keeps its slice of the queries, and gathers keys.
    HEADS: the mixer keeps its slice, except in its recurrence. The recurrence gets some heads of
        whole sequences, or its slice and the state before it, or all heads of whole sequences
        (recurrences.py).
    HALO: the mixer keeps its slice, and its convolution also gets the last tokens before each
        piece.
    """

    WHOLE = "whole"
    QUERIES = "queries"
    HEADS = "heads"
    HALO = "halo"


class GatherArguments(PackageHook):
    """Pre-forward hook of a mixer, which gathers the arguments if the mixer is not divided.

    For packed rows, the hook returns the arguments of the first document. `SliceOutput` runs the
    other documents.

    Attributes:
        split: how the mixer is divided if its rows are not packed.
        current_split: how the mixer is divided in the current forward.
    """

    def __init__(self, layer: LayerSlice, arguments: MixerArguments, split: MixerSplit) -> None:
        self.layer, self.arguments, self.split = layer, arguments, split
        self.current_split = MixerSplit.WHOLE

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        part = self.layer.part
        if part is None:
            return None
        # Attention inside the mixer gets whole sequences, as if sequences were not split.
        kwargs = {name: value for name, value in kwargs.items() if name != SLICE}
        self.current_split = self._choose_split(module, part, kwargs)
        if self.current_split == MixerSplit.QUERIES:
            cache = GatheringCache(part, get_compress_rate(module))
            kwargs |= {name: cache for name in CACHE_NAMES if name in kwargs}
        if self.current_split != MixerSplit.WHOLE:
            return self.arguments.change((args, kwargs), partial(_slice_mask, part))
        call = self.arguments.change((args, kwargs), lambda name, x: self._gather(name, x, part))
        if part.documents is None:
            return call
        rows = len(part.documents)
        documents = [
            Document(row, rows, start, stop)
            for row, bounds in enumerate(part.documents)
            for start, stop in bounds
        ]
        first, *others = [self.arguments.cut_document(call, d) for d in documents]
        self.layer.other_documents = others
        return first

    def _choose_split(self, module: nn.Module, part: Slice, kwargs: dict[str, Any]) -> MixerSplit:
        if part.size == 1 or part.documents is not None or describes_packing(kwargs):
            return MixerSplit.WHOLE
        if self.split == MixerSplit.QUERIES and not _can_split_queries(part, kwargs):
            return MixerSplit.WHOLE
        has_halo = self.split in (MixerSplit.HEADS, MixerSplit.HALO)
        if has_halo and part.piece_length < get_convolution_width(module):
            return MixerSplit.WHOLE  # The halo would come from more than one piece.
        return self.split

    def _gather(self, name: str, value: Any, part: Slice) -> Any:
        """Return the whole tensor of an argument; gather a slice that has one entry per token.

        Arguments without one entry per token are returned as they are.
        """
        if part.size == 1 or not isinstance(value, Tensor):
            return value
        whole = part.find_whole(value)
        if whole is not None:
            return whole
        if not self.arguments.has_tokens(name, value):
            return value
        if value.shape[1] != part.local_length:
            raise ValueError(
                f"{name} of {self.arguments.name} has {value.shape[1]} entries, but the slices of "
                f"{part.size} ranks have {part.local_length} tokens; leave sp_size and cp_size at 1"
            )
        return gather_slices(value, part)


def _can_split_queries(part: Slice, kwargs: dict[str, Any]) -> bool:
    """Return False if stock code would treat the slice's queries as the end of the sequence.

    Stock code does so for a single query, and if it is called with position_ids=None.
    """
    return part.local_length > 1 and kwargs.get("position_ids", part) is not None


def _slice_mask(part: Slice, name: str, value: Any) -> Any:
    """Slice a mask to the tokens (B, S) or query rows (B or 1, 1, S, S) of this rank.

    Padding queries see every key, because the output of a query that sees no key is NaN.
    """
    if not name.endswith("mask") or value is None:
        return value
    if value.ndim == 2:
        return part.take_shared(value, 1)
    return part.take_shared(value, 2, fill=value.dtype == torch.bool)


class SliceOutput(PackageHook):
    """Forward hook of a mixer, which slices the mixer's output.

    For packed rows the hook first runs the mixer on the other documents, and joins the outputs.
    """

    def __init__(self, gather: GatherArguments) -> None:
        self.gather = gather

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        part = self.gather.layer.part
        if part is None or self.gather.current_split != MixerSplit.WHOLE:
            return None
        if part.documents is not None:
            layer = self.gather.layer
            calls, layer.other_documents = layer.other_documents, []
            outputs = [output, *(module.forward(*args, **kwargs) for args, kwargs in calls)]
            output = _join_documents(outputs, part.documents)
        if part.size == 1:
            return output
        if isinstance(output, Tensor):
            return part.take(output, 1)
        return tuple(None if x is None else part.take(x, 1) for x in _keep_token_outputs(output))


def _keep_token_outputs(outputs: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Replace the outputs of a mixer that do not have one entry per token by None.

    The first output is the hidden states (B, S, H). Other outputs with three dimensions, (B, S, K),
    are the tokens that an indexer has chosen. Attention weights and states have four dimensions,
    and layers ignore them.
    """
    first, *others = outputs
    return first, *(x if isinstance(x, Tensor) and x.ndim == 3 else None for x in others)


def _join_documents(outputs: list[Any], documents: list[list[tuple[int, int]]]) -> Any:
    """Join the outputs (1, length of the document, ...) of all documents to (B, S, ...)."""
    if isinstance(outputs[0], tuple):
        by_position = zip(*map(_keep_token_outputs, outputs), strict=True)
        return tuple(_join_documents(list(outputs), documents) for outputs in by_position)
    if outputs[0] is None:
        return None
    width = max(x.shape[-1] for x in outputs)
    remaining = iter([_widen(x, width) for x in outputs])
    return torch.cat([torch.cat([next(remaining) for _ in row], dim=1) for row in documents])


def _widen(x: Tensor, width: int) -> Tensor:
    """Repeat the last column until there are `width` columns.

    An indexer chooses fewer tokens in a document that is shorter than its limit. It does not matter
    if a token is chosen twice.
    """
    missing = width - x.shape[-1]
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1) if missing else x
