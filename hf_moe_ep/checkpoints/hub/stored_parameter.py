"""Read a box of one parameter from the checkpoint tensors that store the parameter.

A box has one index range per dim (`ranks/boxes.py`). A piece is a box of a checkpoint tensor and
the elements of the parameter that this box contains (`pieces.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.hub.pieces import Piece, cut_pieces, find_filled_box
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader
from hf_moe_ep.ranks.boxes import Box, make_slices


@dataclass(frozen=True)
class StoredParameter:
    """The pieces and files in which a checkpoint stores a parameter.

    Attributes:
        pieces: the pieces that make up the parameter, each with its tensor in the files.
        dtype: the dtype in which the model was built. Decoded values are rounded to this dtype.
    """

    pieces: list[tuple[Piece, FileTensor]]
    dtype: torch.dtype

    def restrict_to_expert(self, expert: int) -> StoredParameter:
        """Restrict a stacked weight to the pieces that can hold elements of one expert."""
        pieces = [(piece, tensor) for piece, tensor in self.pieces if _may_hold(piece, expert)]
        return StoredParameter(pieces, self.dtype)

    @torch.no_grad()
    def read_into(self, target: Tensor, box: Box, reader: Reader) -> None:
        """Read a box of the parameter into `target`, which has the shape of the box."""
        tensors = {piece.key: tensor for piece, tensor in self.pieces}
        for key, pieces in cut_pieces((piece for piece, _ in self.pieces), box).items():
            tensor, view = tensors[key], pieces[0].view
            # If pieces fill one box together, such as interleaved rows, one call reads them all.
            # Tensors that must be decoded are read piece by piece.
            filled = find_filled_box(pieces) if type(tensor) is FileTensor else None
            values = None if filled is None else reader.read(tensor, filled, view)
            for piece in pieces:
                out = piece.in_view(target[piece.slices_in(box)])
                part = piece.box_in_view
                if values is None or filled is None:
                    tensor.read_into(out, part, view=piece.view, dtype=self.dtype, reader=reader)
                else:
                    out.copy_(values[make_slices(part, filled)])


def _may_hold(piece: Piece, expert: int) -> bool:
    first = piece.start[0]
    return first <= expert < first + piece.sizes[0] * piece.steps[0]
