"""Safetensors files by byte ranges: read a part of a tensor, write tensors one after the other.

    8 bytes     length of the header, little endian
    header      JSON: {key: {"dtype": "BF16", "shape": [..], "data_offsets": [start, stop]}, ..}
    data        the tensors, row-major, offsets counted from here

https://huggingface.co/docs/safetensors/en/index#format. The library itself maps whole files into
memory to read and wants all tensors of a file in memory to write; a rank here reads only what it
keeps, and the writer holds one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.storage.atomic import sha256_of
from hf_moe_ep.checkpoints.storage.boxes import Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # as the library has it
# Of a fingerprint: tensors of a kind, and bytes of each.
_SAMPLES, _SAMPLE = 32, 4096
_PIECE = 4 << 20  # bytes


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its file, and its first byte there."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @staticmethod
    def of_header(file: Path, said: dict[str, Any], data: int, size: int) -> Entry:
        """Make one of what a header says of one tensor; its data begin at byte `data` of `size`.

        Raises:
            ValueError: the file is damaged, or its dtype is not supported.
            KeyError, TypeError: a field is missing, or no number.
        """
        start, stop = map(operator.index, said["data_offsets"])
        dtype = _DTYPES.get(said["dtype"])
        if dtype is None:
            raise ValueError(f"{file}: a tensor has dtype {said['dtype']}, which is not supported")
        shape = tuple(map(operator.index, said["shape"]))
        entry = Entry(file, dtype, shape, data + start)
        if stop - start != _bytes(entry) or start < 0 or min(shape, default=0) < 0:
            raise ValueError(
                f"{file} has a damaged header: a tensor {shape} in bytes {start} to {stop}"
            )
        if data + stop > size:
            raise ValueError(
                f"{file} is truncated: it has {size} bytes, a tensor ends {data + stop}"
            )
        return entry


def read_index(directory: str | os.PathLike[str], single: str = SINGLE) -> dict[str, Entry]:
    """Find every tensor of a checkpoint folder, by key.

    Args:
        single: the name of the file where there is one; an index adds ".index.json" to it.

    Raises:
        ValueError: no safetensors checkpoint; a file that is missing, truncated or no safetensors
            file; a tensor that the index promises and its file has not. The file is named.
    """
    directory, index = Path(directory), f"{single}.index.json"
    if (directory / single).is_file():  # stock looks for it first, too
        return read_header(directory / single)
    if not (directory / index).is_file():
        raise ValueError(
            f"{directory} holds no safetensors checkpoint: neither {single} nor {index} is there"
        )
    try:
        places: dict[str, str] = json.loads((directory / index).read_text("utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{directory / index} is no index or damaged: {reason}") from error
    entries: dict[str, Entry] = {}
    for name in names:
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name} is missing, and {index} names it")
        held = read_header(directory / name)
        wanted = {key for key, file in places.items() if file == name}
        if absent := sorted(wanted - held.keys()):
            raise ValueError(f"{directory / name} has no tensor {absent[0]}, and {index} says so")
        entries.update((key, entry) for key, entry in held.items() if key in wanted)
    return entries


def read_header(path: Path) -> dict[str, Entry]:
    """Find every tensor of one file, by key; ValueError where the file is not whole."""
    text, size = _read_text(path)
    length = len(text)
    try:
        tensors = _parse(text)
    # RecursionError: brackets in brackets.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} has a damaged header: {reason}") from error
    entries, end = {}, 0
    for start, stop, key, name, shape in tensors:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise ValueError(f"{path}: {key} has dtype {name}, which is not supported")
        entry = Entry(path, dtype, shape, 8 + length + start)
        # As the library demands: one behind the other, and no bytes between them.
        if start != end or stop - start != _bytes(entry) or min(shape, default=0) < 0:
            raise ValueError(
                f"{path} has a damaged header: {key} {shape} in bytes {start} to {stop}, "
                f"behind {end} bytes of others"
            )
        entries[key], end = entry, stop
    end += 8 + length
    if size != end:
        raise ValueError(f"{path} is truncated or damaged: it has {size} bytes instead of {end}")
    return entries


def read_table(path: Path) -> tuple[dict[str, Any], int, int]:
    """Read the header of a file as it stands there: (header, first byte of data, size of the file).

    Raises:
        ValueError: the file is damaged.
    """
    text, size = _read_text(path)
    try:
        table = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:  # brackets in brackets
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} has a damaged header: {reason}") from error
    return table, 8 + len(text), size


def _read_text(path: Path) -> tuple[bytes, int]:
    """Read the text of a file's header; and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path} is no safetensors file or was cut off: it has {size} bytes")
        return file.read(length), size


def _parse(text: bytes) -> list[tuple[int, int, str, str, tuple[int, ...]]]:
    """List (start, stop, key, dtype, shape) of a header, in the order of the bytes."""
    header = json.loads(text)
    header.pop("__metadata__", None)
    tensors = []
    for key, value in header.items():
        start, stop = map(operator.index, value["data_offsets"])
        tensors.append(
            (start, stop, key, str(value["dtype"]), tuple(map(operator.index, value["shape"])))
        )
    return sorted(tensors)


def fingerprint(entries: Mapping[str, Entry]) -> str:
    """Hash all names and shapes, and the first values of some tensors of every kind.

    Cheap on any file system, and tells weights apart that were trained apart; it does not depend
    on how tensors are spread over files.
    """
    digest, kinds = hashlib.sha256(), dict[str, list[str]]()
    for key, entry in sorted(entries.items()):
        digest.update(f"{key} {entry.dtype} {entry.shape} ".encode())
        kinds.setdefault(re.sub(r"\d+", "*", key), []).append(key)
    for keys in kinds.values():
        for key in keys[:: -(-len(keys) // _SAMPLES)]:
            entry = entries[key]
            with entry.file.open("rb") as file:
                file.seek(entry.start)
                digest.update(file.read(min(_bytes(entry), _SAMPLE)))
    return digest.hexdigest()


def same_values(one: Entry, other: Entry) -> bool:
    """Compare two tensors to the byte; read in pieces."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = _bytes(one)
        while left and first.read(min(left, _PIECE)) == second.read(min(left, _PIECE)):
            left -= min(left, _PIECE)
    return not left


def _bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError where no file can hold it."""
    if dtype not in _NAMES:
        raise ValueError(f"{name} is {dtype}, which safetensors files do not hold")


class Reader:
    """Reads parts of tensors; keeps files open until it is closed."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; another read opens its own again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, entry: Entry, box: Box, view: tuple[int, ...] | None = None) -> Tensor:
        """Read the part `box` of a tensor, and no other byte of it.

        `view` is a shape in which the tensor is seen; None is its own.
        """
        if view is not None:
            entry = replace(entry, shape=view)
        sizes = [stop - start for start, stop in box]
        flat = torch.empty(math.prod(sizes) * entry.dtype.itemsize, dtype=torch.uint8)
        if flat.numel():
            target, done = flat.numpy().data, 0
            if entry.file not in self._open:
                self._open[entry.file] = os.open(entry.file, os.O_RDONLY)
            for start, length in _runs(entry, box):
                self._fill(entry.file, target[done : done + length], start)
                done += length
        return flat.view(entry.dtype).view(sizes)

    def _fill(self, file: Path, target: memoryview, start: int) -> None:
        while target:
            got = os.preadv(self._open[file], [target], start)  # 2 GiB at most
            if got == 0:
                raise ValueError(f"{file} ends at byte {start}; it was cut off while it was read")
            target, start = target[got:], start + got


def _runs(entry: Entry, box: Box) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) of the stretches that make up `box`, in order."""
    whole = len(box)
    while whole and box[whole - 1] == (0, entry.shape[whole - 1]):
        whole -= 1
    # Dims from `whole` on are complete: one stretch per index of the dims before `whole - 1`.
    strides = [math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize for dim in range(len(box))]
    split = max(whole - 1, 0)
    first = box[split][0] * strides[split] if box else 0
    length = (box[split][1] - box[split][0]) * strides[split] if box else entry.dtype.itemsize
    for index in product(*(range(*box[dim]) for dim in range(split))):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield entry.start + first + offset, length


class Writer:
    """Writes one file; `header` is all of its tensors, (key, shape, dtype), in order.

    `about` stands beside them in the header, text by name.
    """

    def __init__(
        self,
        path: Path,
        header: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
        about: Mapping[str, str] | None = None,
    ) -> None:
        table: dict[str, object] = {"__metadata__": {**(about or {}), "format": "pt"}}
        places, end = {}, 0
        for key, shape, dtype in header:
            size = math.prod(shape) * dtype.itemsize
            offsets = [end, end + size]
            table[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
            places[key] = Entry(path, dtype, shape, end)
            end += size
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        self._places = {
            key: replace(place, start=data + place.start) for key, place in places.items()
        }
        self._path, self._left = path, data + end
        self._digest, self._end, self._in_order = hashlib.sha256(), 0, True
        self._file = path.open("wb", buffering=0)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    def write(self, key: str, view: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        """Write the part `box` of a tensor seen in the shape `view`.

        In the order of the file it is hashed on the way; out of order, once more at the end.
        """
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        done = 0
        for start, length in _runs(replace(self._places[key], shape=view), box):
            self._put(data[done : done + length], start)
            done += length

    def _put(self, data: bytes | memoryview, start: int) -> None:
        self._in_order = self._in_order and start == self._end
        if self._in_order:
            self._digest.update(data)
        if start != self._end:
            self._file.seek(start)
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:  # a full disk: which one?
            raise OSError(error.errno, error.strerror, os.fspath(self._path)) from error
        self._end = start + len(data)
        self._left -= len(data)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                assert self._left == 0, f"{self._left} bytes of the header were not written"
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def sha256(self) -> str:
        """The hash of the file, when it is complete."""
        return self._digest.hexdigest() if self._in_order else sha256_of(self._path)
