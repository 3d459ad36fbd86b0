"""Load stacked expert matrices into experts that are held quantised, one expert at a time.

For 2 experts [4, 128] on a rank, in nf4, from a bf16 checkpoint:

    expert 0   read into a buffer [4, 128]    quantised into bytes [0], scales [0]
    expert 1   read into the same buffer      quantised into bytes [1], scales [1]

Besides the quantised bytes a rank needs memory for one matrix of one expert, in the dtype in which
the model was built. For every format of a checkpoint the result is the same as if the whole model
were loaded first and then quantised. With double quantisation the scales of all rows of a matrix
are quantised together, so a rank reads all rows even if its shard has only some of the rows.

If a checkpoint is in FP8 and experts_dtype is "fp8", bytes and scales are copied without decoding a
value. This requires that the blocks of the checkpoint are the 128 x 128 blocks of the expert's
matrix. Otherwise (other block sizes, or gate and up with a number of rows that 128 does not divide)
values are decoded and quantised again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_moe_ep.checkpoints.hub.fp8 import BLOCK, Fp8Tensor, convert_scales
from hf_moe_ep.checkpoints.hub.pieces import Piece
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.etp import (
    get_stock_shape,
    list_stock_parts,
    map_ids_to_split_dims,
    view_in_stock_shape,
)
from hf_moe_ep.ops.quantised import Quantisation, Quantised, quantise
from hf_moe_ep.ranks.boxes import Box, get_local_tensor
from hf_moe_ep.state import STATE, Compute, MoELayer, iterate_quantised_matrices


@dataclass(frozen=True)
class HeldAsBytes:
    """This rank's shard of a stacked matrix [E, O, I] that is held quantised.

    Attributes:
        local: the quantised values and scales of this rank's experts, [L, rows, ..].
        boxes: the boxes of the tensors of `local` in the global tensors, in the order of `by_name`.
            If this rank has two ranges of rows, these are the boxes of the first range.
        shape_OI: the shape of one whole matrix.
        quantisation: the format.
        transposed: True if the model's parameter is [E, I, O].
        second_rows: the second range of this rank's rows, the rows of up, if the model splits the
            rows of gate and up into (2, F) (`etp.py`).
    """

    local: Quantised
    boxes: list[Box]
    shape_OI: tuple[int, int]
    quantisation: Quantisation
    transposed: bool
    second_rows: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes of values and scales on this rank."""
        return sum(tensor.nbytes for tensor in self.local.by_name("").values())

    @torch.no_grad()
    def read(self, stored: StoredParameter, reader: Reader, device: torch.device) -> None:
        """Read this rank's experts from a checkpoint and quantise them on `device`."""
        if self.local.values.numel() == 0:
            return
        copies_bytes = self.quantisation.kind == "fp8" and _has_expert_blocks(stored)
        experts, rows, byte_columns = self.boxes[0]
        ranges = [rows] if self.second_rows is None else [rows, self.second_rows]
        # Double quantisation needs the scales of all rows.
        if self.quantisation.nested:
            ranges = [(0, self.shape_OI[0])]
        per_byte = self.quantisation.values_per_byte
        columns = (byte_columns[0] * per_byte, byte_columns[1] * per_byte)
        num_columns = columns[1] - columns[0]
        # All experts use one buffer, because a new buffer per expert could fragment the memory.
        shape = (1, sum(stop - start for start, stop in ranges), num_columns)
        matrix = None if copies_bytes else torch.empty(shape, dtype=stored.dtype)
        for index, expert in enumerate(range(*experts)):
            stored_expert = stored.restrict_to_expert(expert)
            target, first = self.local.matrix_of(index), 0
            for start, stop in ranges:
                own_rows = slice(first, first + stop - start)
                box: Box = ((expert, expert + 1), (start, stop), columns)
                if self.transposed:
                    box = (box[0], box[2], box[1])
                if matrix is None:
                    self._copy_bytes(stored_expert, box, _slice_rows(target, own_rows), reader)
                else:
                    part = matrix[:, own_rows]
                    stored_expert.read_into(part.mT if self.transposed else part, box, reader)
                first = own_rows.stop
            if matrix is not None:
                quantised = quantise(matrix[0].to(device), self.quantisation)
                self._keep_own_rows(quantised).copy_into(target)

    def _keep_own_rows(self, matrix: Quantised) -> Quantised:
        """Return this rank's rows of a matrix that `read` has quantised."""
        if not self.quantisation.nested:
            return matrix  # `read` has read no other rows
        tensors = zip(matrix.by_name("").values(), self.boxes, strict=True)
        return Quantised(*(tensor[slice(*box[1])] for tensor, box in tensors))

    def _copy_bytes(
        self, stored: StoredParameter, box: Box, target: Quantised, reader: Reader
    ) -> None:
        """Copy FP8 bytes and scales of one expert from the checkpoint."""
        values, scales = target.values[None], target.block_scale[None]
        if self.transposed:
            values, scales = values.mT, scales.mT
        for uncut_piece, tensor in stored.pieces:
            piece = uncut_piece.cut(box)
            if piece is None:
                continue
            assert isinstance(tensor, Fp8Tensor)
            in_target, in_file = piece.slices_in(box), piece.box_in_view
            fp8_bytes = reader.read(replace(tensor, dtype=torch.uint8), in_file)
            piece.in_view(values[in_target]).copy_(fp8_bytes)
            *outer, rows, columns = in_file
            scales_box = (*outer, _find_touched_blocks(rows), _find_touched_blocks(columns))
            factors = reader.read(tensor.scales, scales_box)
            expert, *others = in_target
            blocks = (slice(*_find_touched_blocks((part.start, part.stop))) for part in others)
            piece.in_view(scales[(expert, *blocks)]).copy_(convert_scales(factors))


def _slice_rows(matrix: Quantised, rows: slice) -> Quantised:
    """Return some rows of an FP8 matrix and the scales of their blocks, as views."""
    blocks = slice(*_find_touched_blocks((rows.start, rows.stop)))
    return Quantised(matrix.values[rows], matrix.block_scale[blocks])


def find_quantised_shards(model: nn.Module) -> dict[str, HeldAsBytes]:
    """Find this rank's shards of all matrices that a model holds quantised, by parameter name."""
    shards = {}
    # The dims that the model splits into (2, F) (`etp.py`).
    split_dims = map_ids_to_split_dims(model)
    for name, matrix, quantisation in iterate_quantised_matrices(model):
        tensors, dim = matrix.by_name("").values(), split_dims.get(id(matrix.values))
        _, num_rows, row_bytes = get_stock_shape(matrix.values.shape, dim)
        parts = [box for box, _ in list_stock_parts(matrix.values, dim)]
        shards[name] = HeldAsBytes(
            Quantised(*(view_in_stock_shape(get_local_tensor(tensor), dim) for tensor in tensors)),
            [list_stock_parts(tensor, dim)[0][0] for tensor in tensors],
            (num_rows, row_bytes * quantisation.values_per_byte),
            quantisation,
            _find_compute(model, name).transposed,
            parts[1][1] if len(parts) > 1 else None,
        )
    return shards


def _find_compute(model: nn.Module, name: str) -> Compute:
    layer = getattr(model.get_submodule(name.rpartition(".")[0]), STATE)
    assert isinstance(layer, MoELayer) and layer.compute is not None
    return layer.compute


def _has_expert_blocks(stored: StoredParameter) -> bool:
    """Return True if a stack is stored in FP8 with the blocks of the expert's matrix."""
    return all(
        isinstance(tensor, Fp8Tensor) and tensor.block == (BLOCK, BLOCK) and _is_aligned(piece)
        for piece, tensor in stored.pieces
    )


def _is_aligned(piece: Piece) -> bool:
    """Return True if a piece has consecutive rows and columns and begins at a block's corner."""
    last = len(piece.view)
    return (
        piece.view == piece.shape
        and {*piece.axes[1:]} == {last - 2, last - 1}
        and piece.steps[1:] == (1, 1)
        and not any(index % BLOCK for index in (*piece.start[1:], *piece.corner[-2:]))
    )


def _find_touched_blocks(span: tuple[int, int]) -> tuple[int, int]:
    """Return the blocks that a range [start, stop) of indices touches: (128, 300) gives (1, 3)."""
    return span[0] // BLOCK, -(-span[1] // BLOCK)
