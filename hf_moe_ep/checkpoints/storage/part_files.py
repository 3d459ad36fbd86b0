"""Tensors that ranks wrote in parts, each into files of its own, read by ranks that lie otherwise.

    shard-00002-model-00001-of-00001.safetensors     of rank 1, counted from 1
    header    {"__metadata__": {"DCP_SHARDING_INFO": "{\"w\": {\"saved_offsets\": [4, 0]}, .. }"},
               "w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ..}

holds rows 4 to 8 of w. The form is that of torch.distributed.checkpoint (hf_storage.py), so either
reads what the other wrote. Its reader has every rank read all headers and keep what they say: of
3384 tensors by 128 ranks 433,000 parts. A rank here reads the headers of files that it needs, one
after the other, and stops where nothing is missing; `spread.py` tells which files these are. Where
nobody noted that (files of torch), those of ranks near it come first, its own among them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_moe_ep.checkpoints.storage.boxes import Box, local_box, local_tensor, overlap, slices
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader, Writer, read_table

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def file_name(rank: int, number: int, of: int) -> str:
    """Name the `number`-th file of a rank, counted from 1, as torch.distributed.checkpoint does."""
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{of:05d}.safetensors"


@dataclass(frozen=True)
class Part:
    """What a rank writes of one tensor: `values`, the part of it that is `box`.

    `number` is that of the rank's file, from 1.
    """

    name: str
    box: Box
    values: Tensor
    number: int


def write_parts(folder: Path, rank: int, parts: Iterable[Part], num_files: int) -> dict[str, Any]:
    """Write a rank's files, one tensor in memory at a time; returns size and hash by file name."""
    by_number: dict[int, list[Part]] = {}
    for part in parts:
        by_number.setdefault(part.number, []).append(part)
    written: dict[str, Any] = {}
    for number, of_file in sorted(by_number.items()):
        # What needs to lie at multiples of 8 bytes comes before what does not.
        of_file.sort(key=lambda part: (-part.values.element_size(), part.name))
        path = folder / file_name(rank, number, num_files)
        offsets = {part.name: {_OFFSETS: [at for at, _ in part.box]} for part in of_file}
        header = [(part.name, tuple(part.values.shape), part.values.dtype) for part in of_file]
        about = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
        with Writer(path, header, about) as writer:
            for part in of_file:
                shape = tuple(part.values.shape)
                box = tuple((0, size) for size in shape)
                writer.write(part.name, shape, box, part.values.cpu())
        written[path.name] = {"size": path.stat().st_size, "sha256": writer.sha256}
    return written


def of_rank(name: str) -> int:
    """Return the rank whose file it is; ValueError where the name is not `file_name`'s."""
    match = re.fullmatch(r"shard-(\d+)-model-\d+-of-\d+\.safetensors", name)
    if match is None:
        raise ValueError(f"{name} is no name of a rank's file")
    return int(match[1]) - 1


def nearest_first(names: Iterable[str], rank: int, world: int) -> list[str]:
    """Sort names of files by how near those who wrote them were to a rank, of so many.

    Its own first where as many ranks wrote as now read. Else those that had the same place among
    more or fewer of them: ranks lie in order, so what is looked for is there or not far from it,
    and with fewer readers rather behind it.
    """
    writers = {name: of_rank(name) for name in names}
    place = rank * (1 + max(writers.values(), default=0)) // world
    return sorted(writers, key=lambda name: (abs(writers[name] - place), -writers[name], name))


@dataclass
class _Missing:
    """Part of a tensor that is to be read.

    Attributes:
        local: this rank's part, `box` of the whole.
        left: elements of it that were not read yet.
        found: what was read.
    """

    local: Tensor
    box: Box
    left: int
    found: set[Box] = field(default_factory=set)

    def take(self, box: Box, entry: Entry, reader: Reader) -> bool:
        """Read what a file with `box` holds of it; tell whether nothing is missing any more."""
        common = overlap(box, self.box)
        if common is not None and common not in self.found:
            pairs = zip(common, box, strict=True)
            inside = tuple((start - at, stop - at) for (start, stop), (at, _) in pairs)
            values = reader.read(entry, inside)
            self.local[slices(common, self.box)].copy_(values)
            self.found.add(common)
            self.left -= values.numel()
        return not self.left


def read_parts(files: Iterable[Path], targets: Mapping[str, Tensor]) -> int:
    """Fill `targets`, each as this rank holds it, from files in this order; until all is there.

    Returns:
        The number of files whose headers were read.

    Raises:
        ValueError: a file is damaged, or they do not hold everything together.
    """
    missing: dict[str, _Missing] = {}
    for name, target in targets.items():
        local = local_tensor(target).detach()
        if local.numel():
            missing[name] = _Missing(local, local_box(target), local.numel())
    number = 0
    with Reader() as reader:
        for file in files:
            if not missing:
                break
            number += 1
            for name, box, entry in _parts(file, missing):
                if missing[name].take(box, entry, reader):
                    del missing[name]
            reader.close()
    if missing:
        name, rest = next(iter(missing.items()))
        raise ValueError(
            f"files of {number} ranks lack {rest.left} of {math.prod(rest.local.shape)} values "
            f"that this rank holds of {name} ({len(missing)} tensors lack some); take an older "
            f"checkpoint"
        )
    return number


def _parts(file: Path, missing: Mapping[str, _Missing]) -> Iterator[tuple[str, Box, Entry]]:
    """Yield (name, its box, where it lies) of what a file has of these tensors' missing parts."""
    table, data, size = read_table(file)
    try:
        offsets = json.loads(table.get("__metadata__", {}).get(_SHARDING, "{}"))
        # A copy: what was found is missing no more.
        for name in [name for name in missing if name in table]:
            shape = table[name]["shape"]
            begin = offsets[name][_OFFSETS] if name in offsets else [0] * len(shape)
            # First and fast: of most tensors most files have nothing that is wanted here.
            if _is_beside(begin, shape, missing[name].box):
                continue
            entry = Entry.of_header(file, table[name], data, size)
            pairs = zip(begin, entry.shape, strict=True)
            yield name, tuple((at, at + length) for at, length in pairs), entry
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} has a damaged header: {reason}") from error


def _is_beside(begin: list[int], shape: list[int], box: Box) -> bool:
    """Tell whether a part of `shape` that begins there has nothing of `box`."""
    for at, length, (start, stop) in zip(begin, shape, box, strict=True):
        if at >= stop or at + length <= start:
            return True
    return False
