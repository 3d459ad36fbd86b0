"""Load stacked expert matrices into experts that are held quantised, one expert at a time.

    a rank holds 2 experts [4, 128] in nf4; the checkpoint is bf16
      expert 0   read into a buffer [4, 128]    quantised into bytes [0], scales [0]
      expert 1   read into the same buffer      quantised into bytes [1], scales [1]

Besides the quantised bytes a rank needs memory for one matrix of one expert, in the dtype that the
model was built in. The result is the same as loading the whole model first and quantising it then,
whatever format the checkpoint has. With double quantisation the first scales of all rows of a
matrix are quantised together, so a rank that keeps some rows reads all of them.

A published FP8 checkpoint keeps its bytes with experts_dtype="fp8", if its blocks of 128 x 128 are
those of the expert's matrix: bytes and scales are copied and no value is decoded. Otherwise (other
blocks, or gate and up with a number of rows that 128 does not divide) it is decoded and quantised
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_moe_ep.checkpoints.hub.fp8 import ScaledTensor, scales_as_fp32
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.storage.boxes import Box, box_sizes, local_box, local_tensor
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.ops.quantised import Quantisation, Quantised, dequantised_shape, quantise
from hf_moe_ep.state import STATE, Compute, MoELayer, quantised_matrices

_BLOCK = 128


@dataclass(frozen=True)
class HeldAsBytes:
    """This rank's shard of a stacked matrix [E, O, I] that is held quantised.

    Attributes:
        local: this rank's bytes and scales.
        boxes: the box of the global tensor that each tensor of `local` holds, in the order of
            their names.
        shape_OI: the shape of one whole matrix.
        quantisation: the format.
        transposed: the model's parameter is [E, I, O].
    """

    local: Quantised
    boxes: list[Box]
    shape_OI: tuple[int, int]
    quantisation: Quantisation
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """The number of bytes of values and scales on this rank."""
        return sum(tensor.nbytes for tensor in self.local.by_name("").values())

    @torch.no_grad()
    def read(self, stored: InFiles, reader: Reader, device: torch.device) -> None:
        """Read this rank's experts from a checkpoint and quantise them on `device`."""
        experts, (first, end), _ = self.boxes[0]
        if first == end:
            return
        copies_bytes = self.quantisation.kind == "fp8" and _has_the_same_blocks(stored)
        # Double quantisation needs the scales of all rows.
        rows = (0, self.shape_OI[0]) if self.quantisation.nested else (first, end)
        columns = (0, self.shape_OI[1])
        sides = (columns, rows) if self.transposed else (rows, columns)
        # One buffer for all experts: memory that one expert frees may not fit the next one.
        matrix = None if copies_bytes else torch.empty(1, *box_sizes(sides), dtype=stored.dtype)
        for index, expert in enumerate(range(*experts)):
            box, target = ((expert, expert + 1), *sides), self.local.of(index)
            of_expert = stored.of_expert(expert)
            if matrix is None:
                self._copy_bytes(of_expert, box, target, reader)
                continue
            of_expert.read_into(matrix, box, reader)
            matrix_OI = (matrix[0].T if self.transposed else matrix[0]).to(device)
            self._own_rows(quantise(matrix_OI, self.quantisation)).copy_into(target)

    def _own_rows(self, matrix: Quantised) -> Quantised:
        """Slice this rank's rows of a matrix that was quantised with all of its rows."""
        if not self.quantisation.nested:
            return matrix
        tensors = zip(matrix.by_name("").values(), self.boxes, strict=True)
        return Quantised(*(tensor[slice(*box[1])] for tensor, box in tensors))

    def _copy_bytes(self, stored: InFiles, box: Box, target: Quantised, reader: Reader) -> None:
        """Copy FP8 bytes and scales of one expert from the checkpoint."""
        values, scales = target.values[None], target.block_scale[None]
        if self.transposed:
            values, scales = values.mT, scales.mT
        for whole, tensor in stored.pieces:
            piece = whole.cut(box)
            if piece is None:
                continue
            assert isinstance(tensor, ScaledTensor)
            at, inside = piece.slices_in(box), piece.box_in_view
            found = reader.read(replace(tensor, dtype=torch.uint8), inside)
            piece.in_view(values[at]).copy_(found)
            *outer, rows, columns = inside
            factors = reader.read(tensor.scales, (*outer, _in_blocks(rows), _in_blocks(columns)))
            expert, *sides = at
            blocks = (slice(*_in_blocks((side.start, side.stop))) for side in sides)
            piece.in_view(scales[(expert, *blocks)]).copy_(scales_as_fp32(factors))


def held_as_bytes(model: nn.Module) -> dict[str, HeldAsBytes]:
    """Find this rank's shards of all matrices that a model holds quantised, by parameter name."""
    found = {}
    for name, held, quantisation in quantised_matrices(model):
        tensors = held.by_name("").values()
        found[name] = HeldAsBytes(
            Quantised(*(local_tensor(tensor) for tensor in tensors)),
            [local_box(tensor) for tensor in tensors],
            dequantised_shape(held.values, quantisation.kind),
            quantisation,
            _compute_of(model, name).transposed,
        )
    return found


def _compute_of(model: nn.Module, name: str) -> Compute:
    layer = getattr(model.get_submodule(name.rpartition(".")[0]), STATE)
    assert isinstance(layer, MoELayer) and layer.compute is not None
    return layer.compute


def _has_the_same_blocks(stored: InFiles) -> bool:
    """Tell whether a stack is stored in FP8 with the blocks that the expert's matrix would have."""
    return all(
        isinstance(tensor, ScaledTensor)
        and tensor.block == (_BLOCK, _BLOCK)
        and _begins_a_block(piece)
        for piece, tensor in stored.pieces
    )


def _begins_a_block(piece: Piece) -> bool:
    """Tell whether a piece has neighbouring rows and columns and begins at a corner of a block."""
    last = len(piece.view)
    return (
        piece.view == piece.shape
        and {*piece.axes[1:]} == {last - 2, last - 1}
        and piece.steps[1:] == (1, 1)
        and not any(at % _BLOCK for at in (*piece.start[1:], *piece.corner[-2:]))
    )


def _in_blocks(span: tuple[int, int]) -> tuple[int, int]:
    """Count [start, stop) in blocks: (128, 300) is (1, 3)."""
    return span[0] // _BLOCK, -(-span[1] // _BLOCK)
