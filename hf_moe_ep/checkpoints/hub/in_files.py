"""Reading a box of one parameter from the checkpoint tensors that store it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.pieces import Piece, cut_pieces, filled_box
from hf_moe_ep.checkpoints.storage.boxes import Box, slices
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader


@dataclass(frozen=True)
class InFiles:
    """A parameter as a checkpoint stores it.

    Attributes:
        pieces: which boxes of which checkpoint tensors make up the parameter.
        dtype: the dtype that the model was built in; decoded values are rounded to it.
    """

    pieces: list[tuple[Piece, FileTensor]]
    dtype: torch.dtype

    def of_expert(self, expert: int) -> InFiles:
        """Return the pieces that can hold elements of one expert of a stacked weight."""
        pieces = [(piece, tensor) for piece, tensor in self.pieces if _may_hold(piece, expert)]
        return InFiles(pieces, self.dtype)

    @torch.no_grad()
    def read_into(self, target: Tensor, box: Box, reader: Reader) -> None:
        """Read a box of the parameter into `target`, one piece at a time."""
        tensors = {piece.key: tensor for piece, tensor in self.pieces}
        for key, pieces in cut_pieces((piece for piece, _ in self.pieces), box).items():
            tensor, view = tensors[key], pieces[0].view
            filled = filled_box(pieces) if type(tensor) is FileTensor else None
            block = None if filled is None else reader.read(tensor, filled, view)
            for piece in pieces:
                out = piece.in_view(target[piece.slices_in(box)])
                inside = piece.box_in_view
                if block is None or filled is None:
                    tensor.read_into(out, inside, view=piece.view, dtype=self.dtype, reader=reader)
                else:
                    out.copy_(block[slices(inside, filled)])


def _may_hold(piece: Piece, expert: int) -> bool:
    first = piece.start[0]
    return first <= expert < first + piece.sizes[0] * piece.steps[0]
