"""Write the shards of each rank to files, and read them on ranks of any other layout.

A file has at most one box (index ranges) of a tensor. A rank whose shard is two boxes (`etp.py`)
writes the second box to another file.

    shard-00002-model-00001-of-00001.safetensors     written by rank 1; file names count from 1
    header    {"__metadata__": {"DCP_SHARDING_INFO": "{\"w\": {\"saved_offsets\": [4, 0]}, .. }"},
               "w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ..}

This file holds rows 4 to 7 of w. The format is that of torch.distributed.checkpoint
(hf_storage.py), so torch can read these files and `read_parts` can read torch's files. torch's
reader reads all headers on every rank and stores every shard in a list: 433,000 shards for 3384
tensors on 128 ranks. With `read_parts` a rank reads one file after the other, and stops when it has
all of its elements. `spread.py` finds the files that a rank needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader, Writer, read_header
from hf_moe_ep.ranks.boxes import Box, intersect_boxes, make_slices, make_whole_box

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"

# The shards in one file of one rank: the box and the values of each tensor, by name.
Shards = Mapping[str, tuple[Box, Tensor]]


def make_file_name(rank: int, number: int, num_files: int) -> str:
    """Return torch's name for file `number` of the `num_files` files of a rank, counted from 1."""
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{num_files:05d}.safetensors"


def write_parts(folder: Path, rank: int, files: Sequence[Shards]) -> dict[str, Any]:
    """Write a rank's files, except empty files; one tensor at a time is copied to host memory.

    Returns:
        The size and the sha256 of each file, by the file's name.
    """
    written: dict[str, Any] = {}
    for number, shards in enumerate(files, 1):
        if not shards:
            continue
        # Tensors with larger elements come first, so each tensor is aligned to its element size.
        names = sorted(shards, key=lambda name: (-shards[name][1].element_size(), name))
        path = folder / make_file_name(rank, number, len(files))
        offsets = {name: {_OFFSETS: [start for start, _ in shards[name][0]]} for name in names}
        header = [(name, tuple(shards[name][1].shape), shards[name][1].dtype) for name in names]
        metadata = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
        with Writer(path, header, metadata) as writer:
            for name, shape, _ in header:
                writer.write(name, shape, make_whole_box(shape), shards[name][1].cpu())
        written[path.name] = {"size": path.stat().st_size, "sha256": writer.sha256}
    return written


def find_writer(name: str) -> int:
    """Return the rank that wrote a file, from a name that `make_file_name` made.

    Raises:
        ValueError: `make_file_name` does not make such a name.
    """
    match = re.fullmatch(r"shard-(\d+)-model-\d+-of-\d+\.safetensors", name)
    if match is None:
        raise ValueError(f"{name} is not the name of a rank's file")
    return int(match[1]) - 1


@dataclass
class _UnreadShard:
    """A part of this rank's shard of a tensor that has not been read completely.

    Attributes:
        local: the tensor to fill.
        box: the box of the part in the tensor.
        num_missing: the number of elements that have not been read yet.
        boxes_read: the boxes that have been read.
    """

    local: Tensor
    box: Box
    num_missing: int
    boxes_read: set[Box] = field(default_factory=set)

    def read(self, box: Box, stored: FileTensor, reader: Reader) -> None:
        """Read the elements of the part that are in `stored`, which holds `box` of the tensor."""
        common = intersect_boxes(box, self.box)
        if common is None or common in self.boxes_read:
            return
        pairs = zip(common, box, strict=True)
        in_stored = tuple((start - first, stop - first) for (start, stop), (first, _) in pairs)
        values = reader.read(stored, in_stored)
        self.local[make_slices(common, self.box)].copy_(values)
        self.boxes_read.add(common)
        self.num_missing -= values.numel()


# The parts of this rank's shard of a tensor: (box in the tensor, view of the values).
Parts = Sequence[tuple[Box, Tensor]]


def read_parts(files: Iterable[Path], targets: Mapping[str, Parts]) -> int:
    """Fill this rank's shards of `targets` from `files`, in order, until all shards are full.

    Returns:
        The number of files whose headers were read.

    Raises:
        ValueError: a file is damaged, or the files do not hold all elements.
    """
    unread: dict[str, list[_UnreadShard]] = {}
    for name, parts in targets.items():
        own = [
            _UnreadShard(view.detach(), box, view.numel()) for box, view in parts if view.numel()
        ]
        if own:
            unread[name] = own
    num_files = 0
    with Reader() as reader:
        for file in files:
            if not unread:
                break
            num_files += 1
            for name, box, stored in _find_shards(file, unread):
                for part in unread[name]:
                    part.read(box, stored, reader)
                unread[name] = [part for part in unread[name] if part.num_missing]
                if not unread[name]:
                    del unread[name]
            reader.close()
    if unread:
        name, (shard, *_) = next(iter(unread.items()))
        raise ValueError(
            f"{num_files} files lack {shard.num_missing} of "
            f"{math.prod(shard.local.shape)} values in this rank's shard of {name} "
            f"({len(unread)} tensors are incomplete); load an older checkpoint"
        )
    return num_files


def _find_shards(
    file: Path, unread: Mapping[str, Sequence[_UnreadShard]]
) -> Iterator[tuple[str, Box, FileTensor]]:
    """Yield (name, box, tensor in the file) for each shard in a file that this rank still needs."""
    tensors, metadata = read_header(file)
    try:
        offsets = json.loads(metadata.get(_SHARDING, "{}"))
        # A list, because the caller removes complete tensors from `unread`.
        for name in [name for name in unread if name in tensors]:
            shape = tensors[name].shape
            starts = offsets[name][_OFFSETS] if name in offsets else [0] * len(shape)
            box = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
            if any(intersect_boxes(box, part.box) is not None for part in unread[name]):
                yield name, box, tensors[name]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} has a damaged header: {reason}") from error
