"""Compute each document of packed rows as if it were alone, in a model with mixers.

If several documents are packed into one row, stock mixers mix the documents silently. Here a mixer
runs once per document (`mixers.py`), and the mask of attention separates the documents even if the
model has built this mask without the position ids. This also applies to a model with sp_size=1,
where nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hf_moe_ep.sequence.mixer_arguments import Call, MixerArguments
from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.slices import Slice
from hf_moe_ep.state import Ours
from hf_moe_ep.upstream.attention_interface import is_eager, uses_flash_attention


class SeparateDocuments(Ours):
    """Pre-forward hook of an attention module in a model with mixers: separates packed documents.

    Most models build a mask that separates documents whose position ids restart. Some models, such
    as GraniteMoeHybrid, build all masks without position ids.
    """

    def __init__(self, layer: LayerSlice, arguments: MixerArguments) -> None:
        self.layer, self.arguments = layer, arguments

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        part = self.layer.part
        if part is None or part.documents is None:
            return None
        if uses_flash_attention(module):
            if kwargs.get("position_ids") is None:
                raise ValueError(
                    f"position_ids restart within a row, which means packed documents, but "
                    f"{self.arguments.name} gets no positions, so flash attention would mix the "
                    f"documents; use attn_implementation='sdpa', or pad each document to a row of "
                    f"its own"
                )
            return None
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]

        def separate(name: str, value: Any) -> Any:
            if name != "attention_mask":
                return value
            if isinstance(value, Tensor) and value.dtype == torch.bool and is_eager(module):
                raise ValueError(
                    f"position_ids restart within a row, which means packed documents, and "
                    f"{self.arguments.name} got an attention_mask of booleans, which eager "
                    f"attention adds to its scores, so it would mix the documents; pass a mask of "
                    f"numbers, or leave the mask out"
                )
            separate_in = _separate_blocks if isinstance(value, BlockMask) else _separate
            if id(value) not in part.separated:
                part.separated[id(value)] = value, separate_in(value, part, hidden.device)
            return part.separated[id(value)][1]

        return self.arguments.change((args, kwargs), separate)


def _separate(mask: Tensor | None, part: Slice, device: torch.device) -> Tensor:
    """Hide all tokens of other documents in a mask (B or 1, 1, S, S) of attention.

    None stands for the causal mask of scaled_dot_product_attention.
    """
    numbers = _number_documents(part).to(device)
    same = (numbers.unsqueeze(1) == numbers.unsqueeze(2)).unsqueeze(1)  # (B, 1, S, S)
    if mask is None:
        return same.tril()
    if mask.dtype != torch.bool:
        return mask.masked_fill(~same, torch.finfo(mask.dtype).min)
    separated = mask & same
    # With a mask of the caller, a padding token may see only tokens of other documents. It sees
    # every token then, because the output of a query that sees no token is NaN.
    return separated | ~separated.any(-1, keepdim=True)


def _separate_blocks(mask: BlockMask, part: Slice, device: torch.device) -> BlockMask:
    """Return a mask of FlexAttention that also hides all tokens of other documents."""
    numbers = _number_documents(part).to(device)

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers[row, query] == numbers[row, key]
        return same & mask.mask_mod(row, head, query, key)

    sizes = len(numbers), mask.shape[1], part.length, part.length
    return create_block_mask(mask_mod, *sizes, device=device, BLOCK_SIZE=mask.BLOCK_SIZE)


def _number_documents(part: Slice) -> Tensor:
    """Return the number of the document of each token, (B, S)."""
    assert part.documents is not None
    numbers = torch.zeros(len(part.documents), part.length, dtype=torch.int64)
    for row, bounds in enumerate(part.documents):
        for number, (start, stop) in enumerate(bounds):
            numbers[row, start:stop] = number
    return numbers


def text_positions(positions: Tensor) -> Tensor | None:
    """Return the text positions (B or 1, S), or None if there are only times, rows and columns.

    Positions with axes have the text in front, (4, B or 1, S), or only the time, row and column of
    each token, (3, B, S).
    """
    if positions.ndim < 3:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def find_documents(positions: Tensor | None, rows: int) -> list[list[tuple[int, int]]] | None:
    """Return the bounds of the documents in every row, or None if each row is one document.

    As in transformers (masking_utils.py, find_packed_sequence_indices), a document begins where the
    position is not the previous one plus 1. `split.py` calls rows with a mask packed only if their
    positions restart (`_restarts`). The function copies the positions to the host.

    Args:
        positions: (B or 1, S), or (4, B or 1, S) with the positions of the text first. Positions of
            the shape (3, B, S) do not describe packed documents.
        rows: the number of rows B.
    """
    positions = None if positions is None else text_positions(positions)
    if positions is None:
        return None
    is_start = functional.pad(positions.diff() != 1, (1, 0))
    starts: list[list[int]] = [[] for _ in range(len(positions))]
    for row, start in is_start.nonzero().tolist():
        starts[row].append(start)
    if not any(starts):
        return None
    length = positions.shape[1]
    bounds = [list(zip([0, *x], [*x, length], strict=True)) for x in starts]
    return bounds * rows if len(bounds) == 1 else bounds
