"""Stacked matrices of a checkpoint into experts that are held as bytes: expert by expert.

    bf16 on disk, 2 experts [4, 128] of a rank, nf4
      expert 0   read into a buffer [4, 128]    quantised into bytes [0], scales [0]
      expert 1   read into the same buffer      quantised into bytes [1], scales [1]

Beside its bytes a rank holds one matrix of one expert, in the dtype that the model was built in,
and what is read of it at a time. Whatever a checkpoint holds, bf16 or what is decoded, becomes what
it would if it was loaded first and quantised then. With double quantisation all scales of a matrix
decide: a rank that keeps some of its rows reads all.

FP8 as it is published stays what it is with experts_dtype="fp8", where its blocks of 128 x 128 are
those of the matrix: bytes and scales are read to their places and no value is formed. Where they
are not (other blocks, or gate and up of rows that 128 does not divide), it is decoded and quantised
anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_moe_ep.checkpoints.hub.fp8 import Scaled, scales_as_fp32
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.mxfp4 import Packed
from hf_moe_ep.checkpoints.hub.pieces import Part, Piece
from hf_moe_ep.checkpoints.storage.boxes import Box, local_box, local_tensor
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.ops.quantised import Quantisation, Quantised, dequantised_shape, quantise
from hf_moe_ep.state import STATE, Compute, MoELayer, quantised_matrices

_BLOCK = 128


@dataclass(frozen=True)
class HeldAsBytes:
    """This rank's part of a stacked matrix [E, O, I] that is held quantised.

    Attributes:
        local: bytes and scales of this rank.
        boxes: which part of the whole each of them is, in the order of their names.
        shape_OI: of one whole matrix.
        quantisation: how it is held.
        transposed: the parameter that they stand for is [E, I, O].
    """

    local: Quantised
    boxes: list[Box]
    shape_OI: tuple[int, int]
    quantisation: Quantisation
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """How many bytes of values and scales this rank holds."""
        return sum(tensor.nbytes for tensor in self.local.by_name("").values())

    @torch.no_grad()
    def read(self, stored: InFiles, reader: Reader, device: torch.device) -> None:
        """Read what a checkpoint has `stored` of the parameter; quantise it on `device`."""
        experts, (first, end), _ = self.boxes[0]
        if first == end:
            return
        keeps = self.quantisation.kind == "fp8" and _blocks_are_ours(stored)
        # All rows where scales of all of them decide.
        rows = (0, self.shape_OI[0]) if self.quantisation.nested else (first, end)
        columns = (0, self.shape_OI[1])
        sides = (columns, rows) if self.transposed else (rows, columns)
        if keeps:
            matrix = None
        else:
            # One for all: what is freed of an expert need not be there for the next.
            matrix = torch.empty(1, *(b - a for a, b in sides), dtype=stored.dtype)
        for index, expert in enumerate(range(*experts)):
            box, place = ((expert, expert + 1), *sides), self.local.of(index)
            of_expert = stored.of_expert(expert)
            if matrix is None:
                self._read_as_it_is(of_expert, box, place, reader)
                continue
            of_expert.read_into(matrix, box, reader)
            matrix_OI = (matrix[0].T if self.transposed else matrix[0]).to(device)
            self._own_rows(quantise(matrix_OI, self.quantisation)).copy_into(place)

    def _own_rows(self, one: Quantised) -> Quantised:
        """Return what this rank keeps of a matrix; nested, all of its rows were quantised."""
        if not self.quantisation.nested:
            return one
        cut = zip(one.by_name("").values(), self.boxes, strict=True)
        return Quantised(*(tensor[slice(*box[1])] for tensor, box in cut))

    def _read_as_it_is(self, stored: InFiles, box: Box, place: Quantised, reader: Reader) -> None:
        """Read bytes and scales of one expert to their places."""
        values, scales = place.values[None], place.block_scale[None]
        if self.transposed:
            values, scales = values.mT, scales.mT
        assert not isinstance(stored.parts, Packed)
        for piece, entry in stored.parts:
            part = piece.overlap(box)
            if part is None:
                continue
            assert isinstance(entry, Scaled)
            found = reader.read(replace(entry, dtype=torch.uint8), part.in_file)
            values[part.slices].copy_(piece.in_parameter(found))
            of_blocks = _in_blocks(part)
            factors = scales_as_fp32(reader.read(entry.scales, of_blocks.in_file))
            scales[of_blocks.slices].copy_(piece.in_parameter(factors))


def held_as_bytes(model: nn.Module) -> dict[str, HeldAsBytes]:
    """Find this rank's part of what a sharded model holds quantised, by the parameter's name."""
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


def _blocks_are_ours(stored: InFiles) -> bool:
    """Tell whether all of a stack lies in FP8, and blocks of a file are blocks of its matrices."""
    if isinstance(stored.parts, Packed):
        return False
    return all(
        isinstance(entry, Scaled) and entry.block == (_BLOCK, _BLOCK) and _begins_a_block(piece)
        for piece, entry in stored.parts
    )


def _begins_a_block(piece: Piece) -> bool:
    """Tell whether a piece has whole rows and columns of a tensor, from a block's corner on."""
    last = len(piece.view)
    return (
        piece.view == piece.shape
        and {*piece.axes[1:]} == {last - 2, last - 1}
        and piece.steps[1:] == (1, 1)
        and not any(at % _BLOCK for at in (*piece.start[1:], *piece.corner[-2:]))
    )


def _in_blocks(part: Part) -> Part:
    """Count rows and columns in blocks, in the parameter and in the file."""
    expert, *sides = part.slices
    of_blocks = (slice(side.start // _BLOCK, -(-side.stop // _BLOCK)) for side in sides)
    *outer, rows, columns = part.in_file
    in_file = ((start // _BLOCK, -(-stop // _BLOCK)) for start, stop in (rows, columns))
    return Part((expert, *of_blocks), (*outer, *in_file))
