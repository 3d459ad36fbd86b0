"""What of a checkpoint's files makes up one tensor of a model, and how a part of it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.fp8 import Scaled
from hf_moe_ep.checkpoints.hub.mxfp4 import Packed
from hf_moe_ep.checkpoints.hub.pieces import Piece, overlaps
from hf_moe_ep.checkpoints.storage.boxes import Box
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader


@dataclass(frozen=True)
class InFiles:
    """Pieces and the tensors that hold them, or blocks with their scales.

    Attributes:
        parts: as the files have it.
        dtype: that the model was built in; to it is rounded what is decoded.
    """

    parts: list[tuple[Piece, Entry]] | Packed
    dtype: torch.dtype

    def of_expert(self, expert: int) -> InFiles:
        """Return those of a stack that may hold something of one expert."""
        if isinstance(self.parts, Packed):
            return self
        parts = [(piece, entry) for piece, entry in self.parts if _may_hold(piece, expert)]
        return InFiles(parts, self.dtype)

    @torch.no_grad()
    def read_into(self, target: Tensor, box: Box, reader: Reader) -> None:
        """Read the part `box` of the tensor into `target`, which has its shape; piece by piece."""
        if isinstance(self.parts, Packed):
            self.parts.read_into(target, box, reader)
            return
        entries = {piece.key: entry for piece, entry in self.parts}
        for parts in overlaps((piece for piece, _ in self.parts), box):
            read = self._reading(entries[parts.key], reader)
            # Rows that alternate are read in one go.
            block = read(parts.hull, parts.view) if parts.is_filled else None
            for piece, part in parts.parts:
                if block is None:
                    values = read(part.in_file, piece.view)
                else:
                    values = block[parts.inside(part)]
                target[part.slices].copy_(piece.in_parameter(values))

    def _reading(self, entry: Entry, reader: Reader) -> Callable[[Box, tuple[int, ...]], Tensor]:
        """Return what reads a part of a tensor in some view, decoded where it has scales."""
        if isinstance(entry, Scaled):
            return partial(entry.decode, dtype=self.dtype, reader=reader)
        return partial(reader.read, entry)


def _may_hold(piece: Piece, expert: int) -> bool:
    first = piece.start[0]
    return first <= expert < first + piece.sizes[0] * piece.steps[0]
