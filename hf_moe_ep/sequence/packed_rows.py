"""Compute each document of packed rows as if it were alone, where stock code would mix documents.

If several documents are packed into one row, stock mixers mix the documents silently.
`find_documents` finds where documents begin. `GatherArguments` in `mixers.py` cuts the arguments of
a mixer there (`MixerArguments.cut_document`), and the mixer runs once per document. Attention
separates the documents even if the model has built its mask without the position ids, as some
models without mixers do (MASKS_WITHOUT_POSITIONS). All this also holds for a model with sp_size=1,
where nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from hf_moe_ep.sequence.block_masks import build_block_mask
from hf_moe_ep.sequence.mixer_arguments import Call, MixerArguments
from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.state import PackageHook
from hf_moe_ep.upstream.attention_interface import is_eager, uses_flash_attention


class SeparateDocuments(PackageHook):
    """Pre-forward hook of an attention module, which separates packed documents in its mask.

    Most models build a mask that separates documents whose position ids restart. Some models, such
    as GraniteMoeHybrid and gpt-oss, build all masks without position ids.
    """

    def __init__(self, layer: LayerSlice, arguments: MixerArguments) -> None:
        self.layer, self.arguments = layer, arguments

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        part = self.layer.part
        if part is not None and part.document_numbers is not None:
            return self._separate_arguments(module, args, kwargs, part)
        if part is None or part.documents is None:
            return None
        return self._separate_untraced(module, args, kwargs, part)

    @torch.compiler.disable
    def _separate_untraced(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], part: Slice
    ) -> Call | None:
        """Call `_separate_arguments`. torch.compile would trace each list of documents anew."""
        return self._separate_arguments(module, args, kwargs, part)

    def _separate_arguments(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], part: Slice
    ) -> Call | None:
        """Return the arguments with masks that separate the documents."""
        if uses_flash_attention(module):
            positions = kwargs.get("position_ids")
            if positions is None or find_text_positions(positions) is None:
                raise ValueError(
                    f"position_ids restart within a row, which means packed documents, but "
                    f"{self.arguments.name} gets no positions of the text, so flash attention "
                    f"would mix the documents; use attn_implementation='sdpa', or pad each "
                    f"document to a row of its own"
                )
            return None
        is_causal = getattr(module, "is_causal", True)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]

        def separate_argument(name: str, value: Any) -> Any:
            if name != "attention_mask":
                return value
            if isinstance(value, Tensor) and value.dtype == torch.bool and is_eager(module):
                raise ValueError(
                    f"position_ids restart within a row, which means packed documents, and "
                    f"{self.arguments.name} got an attention_mask of booleans, which eager "
                    f"attention adds to its scores, so it would mix the documents; pass a mask of "
                    f"numbers, or leave the mask out"
                )
            if part.document_numbers is not None:
                # A trace has no ids of tensors. It computes equal masks of several layers once.
                return separate_mask(value)
            if id(value) not in part.separated:
                part.separated[id(value)] = value, separate_mask(value)
            return part.separated[id(value)][1]

        def separate_mask(value: Any) -> Any:
            if isinstance(value, BlockMask):
                return _separate_blocks(value, part, hidden.device)
            separated = _separate_dense(value, part, hidden.device, is_causal=is_causal)
            if value is None and is_eager(module):  # eager attention adds its mask to scores
                return _as_numbers(separated, hidden.dtype)
            return separated

        return self.arguments.change((args, kwargs), separate_argument)


def _separate_dense(
    mask: Tensor | None, part: Slice, device: torch.device, *, is_causal: bool = True
) -> Tensor:
    """Hide all tokens of other documents in an attention mask (B or 1, 1, S, S).

    `mask=None` means a causal mask, or, if attention is not causal, that every token is visible.
    """
    numbers = _number_documents(part).to(device)
    same = (numbers.unsqueeze(1) == numbers.unsqueeze(2)).unsqueeze(1)  # (B, 1, S, S)
    if mask is None:
        return same.tril() if is_causal else same
    if mask.dtype != torch.bool:
        return mask.masked_fill(~same, torch.finfo(mask.dtype).min)
    separated = mask & same
    # In a mask of the caller, a padding token may see only tokens of other documents. It then keeps
    # seeing them, because the output of a query that sees no token is NaN.
    return torch.where(separated.any(-1, keepdim=True), separated, mask)


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return numbers.masked_fill_(~mask, torch.finfo(dtype).min)


def _separate_blocks(mask: BlockMask, part: Slice, device: torch.device) -> BlockMask:
    """Build a mask of FlexAttention that also hides all tokens of other documents."""
    numbers = _number_documents(part).to(device)

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers[row, query] == numbers[row, key]
        return same & mask.mask_mod(row, head, query, key)

    sizes = len(numbers), mask.shape[1], part.length, part.length
    return build_block_mask(mask_mod, sizes, device, mask.BLOCK_SIZE)


def _number_documents(part: Slice) -> Tensor:
    """Return the number of each token's document, (B or 1, S)."""
    if part.document_numbers is not None:
        return part.document_numbers
    assert part.documents is not None
    numbers = torch.zeros(len(part.documents), part.length, dtype=torch.int64)
    for row, bounds in enumerate(part.documents):
        for number, (start, stop) in enumerate(bounds):
            numbers[row, start:stop] = number
    return numbers


def find_text_positions(positions: Tensor) -> Tensor | None:
    """Return the text positions (B or 1, S), or None if there are only times, rows and columns.

    Positions with axes are (4, B or 1, S), with the text positions first, or (3, B, S), with only
    the time, row and column of each token.
    """
    if positions.ndim < 3:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def check_packed_flash(rows: int) -> None:
    """Raise ValueError if a batch with packed documents for flash attention has several rows."""
    if rows > 1:
        raise ValueError(
            f"the batch has {rows} rows with packed documents, and flash attention separates "
            f"documents only in a batch of one row; pack all documents into one row"
        )


def check_described_documents(
    given: dict[str, Any], documents: list[list[tuple[int, int]]] | None, tokens: Tensor
) -> None:
    """Raise ValueError if arguments for kernels describe documents that the positions do not show.

    Convolutions and recurrences in plain PyTorch, and attention other than flash attention, ignore
    these arguments, so they would mix the documents.

    Args:
        given: the arguments of the model.
        documents: what `find_documents` has found in the positions.
        tokens: (B, S, ...), with one entry per token.
    """
    rows, length = tokens.shape[:2]
    bounds = documents or [[(0, length)]] * rows
    known = {row * length + start for row, starts in enumerate(bounds) for start, _ in starts}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if given.get(name) is None:
            continue
        values = torch.as_tensor(given[name])
        if name == "seq_idx":  # (B, S), the number of each token's document
            values = values.flatten().diff().nonzero().flatten() + 1
        unknown = sorted({x for x in values.tolist() if x < rows * length} - known)
        if unknown:
            raise ValueError(
                f"{name} describes packed documents, one of which begins at token {unknown[0]}, "
                f"but position_ids do not restart there, so modules that read only position_ids "
                f"would mix the documents; pass position_ids that restart at 0 in each document, "
                f"as DataCollatorWithFlattening(return_position_ids=True) makes them"
            )


def number_documents(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of each token's document, (B or 1, S), without a copy to the host.

    These are the documents of `find_documents`. With a mask (B, S), a document begins only between
    two visible tokens, and a gap between positions begins one only if all tokens are visible and
    the positions of some row restart (`_choose_mask` in split.py then drops the mask).

    Args:
        positions: the positions of the text, (B or 1, S).
        mask: the attention mask (B, S), or None.
    """
    steps = positions.diff()
    is_start = steps != 1
    if mask is not None:
        is_restart = (mask[:, 1:] * mask[:, :-1]).bool() & (steps <= 0)
        at_gaps = is_restart.any() & mask.all()
        is_start = is_restart | (at_gaps & is_start)
    return functional.pad(is_start, (1, 0)).cumsum(1)


def find_documents(
    positions: Tensor | None, rows: int, *, at_gaps: bool
) -> list[list[tuple[int, int]]] | None:
    """Return the bounds of the documents in every row, or None if each row is one document.

    The function copies the positions to the host.

    Args:
        positions: position ids in a shape of `find_text_positions`. Positions (3, B, S) do not
            describe packed documents.
        rows: the number of rows B.
        at_gaps: True if a document begins wherever the position is not the previous one plus 1, as
            in the masks of transformers (masking_utils.py, find_packed_sequence_indices). False if
            a gap between positions is not enough, as in flash attention.
    """
    positions = None if positions is None else find_text_positions(positions)
    if positions is None:
        return None
    steps = positions.diff()
    is_start = functional.pad(steps != 1 if at_gaps else steps <= 0, (1, 0))
    starts: list[list[int]] = [[] for _ in range(len(positions))]
    for row, start in is_start.nonzero().tolist():
        starts[row].append(start)
    if not any(starts):
        return None
    length = positions.shape[1]
    bounds = [list(zip([0, *x], [*x, length], strict=True)) for x in starts]
    return bounds * rows if len(bounds) == 1 else bounds
