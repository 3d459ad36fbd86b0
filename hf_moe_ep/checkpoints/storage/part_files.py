"""Tensors that ranks wrote in parts, each into files of its own, read by ranks that lie otherwise.

    shard-00002-model-00001-of-00001.safetensors     of rank 1, counted from 1
    header    {"__metadata__": {"DCP_SHARDING_INFO": "{\"w\": {\"saved_offsets\": [4, 0]}, .. }"},
               "w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ..}

holds rows 4 to 8 of w. Files are those of torch.distributed.checkpoint (hf_storage.py), which has
every rank read the headers of all of them, and keeps what they say: of 3384 tensors by 128 ranks
that is 433,000 parts. A rank here reads one header after the other, keeps what it needs of it, and
stops where nothing is missing: where it lies as it was saved, its own file comes first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from hf_moe_ep.checkpoints.storage.boxes import Box, local_box, local_tensor, overlap, slices
from hf_moe_ep.checkpoints.storage.safetensors_file import Entry, Reader, read_table

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def file_name(rank: int, number: int, of: int) -> str:
    """Name the `number`-th file of a rank, counted from 1, as torch.distributed.checkpoint does."""
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{of:05d}.safetensors"


def own_first(names: Iterable[str], rank: int) -> list[str]:
    """Sort names of files, with those first that this rank has written if it lies as it did."""
    own = f"shard-{rank + 1:05d}-"
    return sorted(names, key=lambda name: (not name.startswith(own), name))


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


def _parts(file: Path, names: Mapping[str, object]) -> Iterator[tuple[str, Box, Entry]]:
    """Yield (name, its box, where it lies) of those of these tensors that a file has a part of."""
    table, data, size = read_table(file)
    try:
        offsets = json.loads(table.get("__metadata__", {}).get(_SHARDING, "{}"))
        # A copy: what was found is missing no more.
        for name in [name for name in names if name in table]:
            start = offsets[name][_OFFSETS] if name in offsets else None
            entry = Entry.of_header(file, table[name], data, size)
            begin = start or [0] * len(entry.shape)
            pairs = zip(begin, entry.shape, strict=True)
            yield name, tuple((at, at + length) for at, length in pairs), entry
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} has a damaged header: {reason}") from error
