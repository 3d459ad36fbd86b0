"""Read and write safetensors files by byte ranges, without a whole file in memory.

    8 bytes     length of the header, little endian
    header      JSON: {key: {"dtype": "BF16", "shape": [..], "data_offsets": [start, stop]}, ..}
    data        the tensors, row-major; offsets count from the first byte of the data

https://huggingface.co/docs/safetensors/en/index#format

The library's own `save_file` needs all tensors of a file in memory. `Writer` needs one part of a
tensor at a time. If the file systems allow it, the kernel copies whole tensors of other files, so
they do not pass through the memory of this process.

The library's own `safe_open(..).get_slice(..)` maps the file into memory; `Reader` reads byte
ranges. This was measured on a file of 768 MiB in the page cache (safetensors 0.8.0):

                                 seconds               peak of resident MiB
    part of each tensor      library    Reader         library    Reader
    the whole tensor            0.09      0.17             775         8
    a quarter of the rows       0.03      0.04             260         8
    a quarter of the columns    0.05      0.85             772         8

So a load with `Reader` needs memory only for its shards. If a network file system truncates a file
during a load, `Reader` raises a ValueError that names the file, but a process that maps the file
would be killed by SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.storage.atomic import compute_sha256
from hf_moe_ep.ranks.boxes import Box, get_box_sizes
from hf_moe_ep.upstream.named_weights import find_named_weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The dtypes by their names in safetensors files, and the names by dtype.
DTYPES = {
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
# A fingerprint reads up to _SAMPLE_BYTES of up to _MAX_SAMPLES tensors of each kind.
_SAMPLE_BYTES, _MAX_SAMPLES = 4096, 32
_CHUNK_BYTES = 4 << 20
# Another thread hashes parts of at least this size while they are written.
_MIN_BYTES_FOR_HASH_THREAD = 1 << 18
# The kernel copies a tensor fastest if its position in a block of this size is the same in both
# files.
_COPY_BLOCK_BYTES = 1 << 16
_BYTES_PER_COPY = 1 << 24
# During a copy, another sync to disk begins when more than this many bytes have not been synced.
_BYTES_PER_SYNC = 1 << 26
# Blocks of this size stay in a core's cache while they are hashed.
_HASH_BLOCK_BYTES = 1 << 18
_HASHING_THREADS = 4
# Errors of copy_file_range if the kernel cannot copy: between some file systems, for example.
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file.

    Attributes:
        start: the offset of the tensor's first byte in the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(
        self, out: Tensor, box: Box, *, view: tuple[int, ...], dtype: torch.dtype, reader: Reader
    ) -> None:
        """Read a box (index ranges) of the tensor, viewed in the shape `view`, into `out`.

        Subclasses that decode quantised weights round the values to `dtype`.
        """
        out.copy_(reader.read(self, box, view))


def read_index(directory: str | os.PathLike[str], single: str = SINGLE) -> dict[str, FileTensor]:
    """Find every tensor of a checkpoint folder, by key.

    As in transformers, the file that config.json names has precedence over model.safetensors
    (`upstream/named_weights.py`), and model.safetensors over an index.

    Args:
        single: the file name of a checkpoint in one file. The index of a checkpoint in several
            files has this name with ".index.json" appended.

    Raises:
        ValueError: the folder holds no safetensors checkpoint; a file is missing, is truncated or
            is not a safetensors file; a file lacks a tensor that the index names. The error names
            the file.
    """
    directory, index = Path(directory), f"{single}.index.json"
    named = find_named_weights(directory) if single == SINGLE else None
    if named is not None and not (directory / named).is_file():
        raise ValueError(
            f"{directory} has no {named}, which its config.json names as transformers_weights; add "
            f"the file, or remove the field to load {SINGLE}"
        )
    if named is not None:
        return read_weights(directory, named)
    if not (directory / single).is_file() and not (directory / index).is_file():
        remedy = "load other formats with transformers' from_pretrained, and patch the model"
        raise ValueError(
            f"{directory} holds no safetensors checkpoint: neither {single} nor {index} exists"
            f"{f'; {remedy}' if single == SINGLE else ''}"
        )
    return read_weights(directory, single if (directory / single).is_file() else index)


def read_weights(directory: Path, name: str) -> dict[str, FileTensor]:
    """Find every tensor of the file `name`, or of all files that an index lists.

    Raises:
        ValueError: as `read_index`.
    """
    if not name.endswith(".json"):
        return read_header(directory / name)[0]
    try:
        file_of: dict[str, str] = json.loads((directory / name).read_text("utf-8"))["weight_map"]
        names = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{directory / name} is not an index, or is damaged: {reason}") from error
    tensors: dict[str, FileTensor] = {}
    for file in names:
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file} is missing, but {name} names it")
        in_file, _ = read_header(directory / file)
        in_index = {key for key, other in file_of.items() if other == file}
        if missing := sorted(in_index - in_file.keys()):
            raise ValueError(
                f"{directory / file} has no tensor {missing[0]}, but {name} says that it has"
            )
        tensors.update((key, tensor) for key, tensor in in_file.items() if key in in_index)
    return tensors


def read_files(files: Iterable[Path]) -> dict[str, FileTensor]:
    """Find every tensor of some files, by key; as in transformers, the last file has precedence.

    Raises:
        ValueError: as `read_header`.
    """
    return {key: tensor for file in files for key, tensor in read_header(file)[0].items()}


def read_header(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Read the header of a file.

    Returns:
        The tensors by key, in the order of their bytes, and the metadata of the file.

    Raises:
        ValueError: the file is damaged, truncated, or holds a dtype that is not supported.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is not a safetensors file or is truncated: it has {size} bytes"
            )
        text = file.read(length)
    try:
        rows, metadata = _parse_header(text)
    # json raises RecursionError if brackets are nested too deeply.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} has a damaged header: {reason}") from error
    tensors, end = {}, 0
    for start, stop, key, name, shape in rows:
        dtype = DTYPES.get(name)
        if dtype is None:
            raise ValueError(f"{path}: {key} has dtype {name}, which is not supported")
        tensor = FileTensor(path, dtype, shape, 8 + length + start)
        # The format and the library require that tensors follow each other without gaps.
        if start != end or stop - start != tensor.nbytes or min(shape, default=0) < 0:
            raise ValueError(
                f"{path} has a damaged header: {key} {shape} has bytes {start} to {stop}, but the "
                f"tensor before it ends at byte {end}"
            )
        tensors[key], end = tensor, stop
    end += 8 + length
    if size != end:
        raise ValueError(f"{path} is truncated or damaged: it has {size} bytes instead of {end}")
    return tensors, metadata


def _parse_header(
    text: bytes,
) -> tuple[list[tuple[int, int, str, str, tuple[int, ...]]], dict[str, str]]:
    """Return (start, stop, key, dtype, shape) in the order of the bytes, and the metadata."""
    header = json.loads(text)
    metadata = dict(header.pop("__metadata__", None) or {})
    rows = []
    for key, value in header.items():
        start, stop = map(operator.index, value["data_offsets"])
        rows.append(
            (start, stop, key, str(value["dtype"]), tuple(map(operator.index, value["shape"])))
        )
    return sorted(rows), metadata


def compute_fingerprint(tensors: Mapping[str, FileTensor]) -> str:
    """Hash all names, dtypes and shapes, and the first bytes of some tensors of every kind.

    Tensors whose names differ only in numbers are of one kind. The function reads few bytes. The
    hash differs between two training runs of one model, and does not depend on how tensors are
    distributed over files.
    """
    digest, kinds = hashlib.sha256(), dict[str, list[str]]()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tensor.shape} ".encode())
        kinds.setdefault(re.sub(r"\d+", "*", key), []).append(key)
    for keys in kinds.values():
        for key in keys[:: -(-len(keys) // _MAX_SAMPLES)]:
            tensor = tensors[key]
            with tensor.file.open("rb") as file:
                file.seek(tensor.start)
                digest.update(file.read(min(tensor.nbytes, _SAMPLE_BYTES)))
    return digest.hexdigest()


def have_same_values(tensor: FileTensor, other: FileTensor) -> bool:
    """Return True if two tensors are equal byte by byte; reads 4 MiB of each tensor at a time."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    with tensor.file.open("rb") as file, other.file.open("rb") as other_file:
        file.seek(tensor.start)
        other_file.seek(other.start)
        remaining = tensor.nbytes
        while remaining:
            size = min(remaining, _CHUNK_BYTES)
            if file.read(size) != other_file.read(size):
                return False
            remaining -= size
    return True


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError if safetensors files cannot hold a dtype."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} is {dtype}, which safetensors files cannot hold")


class Reader:
    """Reads boxes (index ranges) of tensors; files stay open until `close` is called."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; a later read opens its file again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, tensor: FileTensor, box: Box, view: tuple[int, ...] | None = None) -> Tensor:
        """Read a box of a tensor, and no bytes outside the box.

        Args:
            box: index ranges in the shape `view`.
            view: the shape in which the tensor is viewed; by default, the tensor's own shape.
        """
        shape = tensor.shape if view is None else view
        sizes = get_box_sizes(box)
        flat = torch.empty(math.prod(sizes) * tensor.dtype.itemsize, dtype=torch.uint8)
        if flat.numel():
            target, position = flat.numpy().data, 0
            if tensor.file not in self._open:
                self._open[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            for start, length in _iterate_byte_ranges(tensor, shape, box):
                self._fill_from_file(tensor.file, target[position : position + length], start)
                position += length
        return flat.view(tensor.dtype).view(sizes)

    def _fill_from_file(self, file: Path, target: memoryview, start: int) -> None:
        while target:
            count = os.preadv(self._open[file], [target], start)  # reads at most 2 GiB
            if count == 0:
                raise _make_truncated_error(file, start)
            target, start = target[count:], start + count


def _iterate_byte_ranges(
    tensor: FileTensor, shape: Sequence[int], box: Box
) -> Iterator[tuple[int, int]]:
    """Yield (first byte, number of bytes) of the contiguous ranges that make up a box, in order.

    In a shape [4, 6, 5] the box (1, 3), (2, 4), (0, 5) is complete along the last dim, so it is two
    ranges of 2 * 5 elements: from element (1, 2, 0) and from element (2, 2, 0) on.
    """
    itemsize = tensor.dtype.itemsize
    if not box:
        yield tensor.start, itemsize
        return
    cut_dim = len(box) - 1  # the dims after this one are complete in the box
    while cut_dim and box[cut_dim] == (0, shape[cut_dim]):
        cut_dim -= 1
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(box))]
    first, stop = box[cut_dim]
    for index in product(*(range(*box[dim]) for dim in range(cut_dim))):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield tensor.start + offset + first * strides[cut_dim], (stop - first) * strides[cut_dim]


class Writer:
    """Writes one safetensors file, box by box."""

    def __init__(
        self,
        path: Path,
        header: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
        metadata: Mapping[str, str] | None = None,
        *,
        aligned_with: FileTensor | None = None,
    ) -> None:
        """Open the file and write its header.

        Args:
            header: (key, shape, dtype) of all tensors, in the order of their bytes.
            metadata: texts by name, which are stored in the header.
            aligned_with: a tensor from which the first tensor is copied. The header is padded with
                spaces, so that both tensors begin at the same position of a block. The kernel
                then copies 512 MiB in 0.13 to 0.16 s, otherwise in 0.21 s (ext4).
        """
        table: dict[str, object] = {"__metadata__": {**(metadata or {}), "format": "pt"}}
        tensors, end = [], 0
        for key, shape, dtype in header:
            tensors.append((key, FileTensor(path, dtype, shape, end)))
            offsets = [end, end + tensors[-1][1].nbytes]
            table[key] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": offsets,
            }
            end = offsets[1]
        text = json.dumps(table, separators=(",", ":")).encode()
        start, step = (0, 8) if aligned_with is None else (aligned_with.start, _COPY_BLOCK_BYTES)
        text += b" " * ((start - 8 - len(text)) % step)
        data = 8 + len(text)
        self._tensors = {key: replace(tensor, start=data + tensor.start) for key, tensor in tensors}
        self._path, self._num_missing = path, data + end
        self._digest, self._end, self._in_order = hashlib.sha256(), 0, True
        self._hashing = ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="hf_moe_ep hashes")
        # Syncs have a thread of their own, because they would wait behind all queued hashes.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="hf_moe_ep syncs")
        self._copied: dict[str, bytes | Future[bytes]] = {}
        self._num_unsynced, self._syncing = 0, Future[None]()
        self._syncing.set_result(None)
        self._file = path.open("wb", buffering=0)
        self._header = len(text).to_bytes(8, "little") + text
        self._write_bytes(self._header, 0)

    def write(self, key: str, view: tuple[int, ...], box: Box, tensor: Tensor) -> None:
        """Write a box of a tensor that is viewed in the shape `view`.

        If all bytes of the file are written in order, they are hashed while they are written.
        Otherwise `sha256` reads the file once more.
        """
        values = tensor.detach().contiguous()
        # A tensor of one element is contiguous with any stride, but a view as bytes needs stride 1.
        flat = values.as_strided((values.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().data
        position = 0
        for start, length in _iterate_byte_ranges(self._tensors[key], view, box):
            self._write_bytes(data[position : position + length], start)
            position += length

    def copy(self, key: str, source: FileTensor, sha256: bytes | None = None) -> None:
        """Copy a whole tensor from another file, byte for byte; the kernel copies where it can.

        Args:
            sha256: the hash of the tensor's bytes, if it is known. Otherwise another thread reads
                the tensor and hashes it; the end of the `with` block waits for this thread.

        Raises:
            ValueError: the source ends in the middle of the tensor.
        """
        tensor = self._tensors[key]
        assert source.nbytes == tensor.nbytes, f"{key} and its source have different sizes"
        self._copied[key] = sha256 or self._hashing.submit(hash_tensor, source)
        self._in_order = False  # `_digest` lacks the copied bytes
        with source.file.open("rb", buffering=0) as file:
            try:
                _copy_bytes(file.fileno(), self._file.fileno(), source, tensor.start)
            except OSError as error:
                raise self._with_name(error) from error
        self._num_missing -= tensor.nbytes
        self._num_unsynced += tensor.nbytes
        if self._num_unsynced > _BYTES_PER_SYNC and self._syncing.done():
            self._syncing.result()
            self._syncing = self._disk.submit(os.fdatasync, self._file.fileno())
            self._num_unsynced = 0

    def _write_bytes(self, data: bytes | memoryview, start: int) -> None:
        self._in_order = self._in_order and start == self._end
        # A large part is hashed while it is written. This method waits for both, so that no part
        # stays in memory.
        hashed: Future[None] | None = None
        if self._in_order and len(data) >= _MIN_BYTES_FOR_HASH_THREAD:
            hashed = self._hashing.submit(self._digest.update, data)
        elif self._in_order:
            self._digest.update(data)
        if start != self._end:
            self._file.seek(start)
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise self._with_name(error) from error
        finally:
            if hashed is not None:
                hashed.result()
        self._end = start + len(data)
        self._num_missing -= len(data)

    def _with_name(self, error: OSError) -> OSError:
        """Add the name of the file to an error of the disk, which may be full."""
        return OSError(error.errno, error.strerror, os.fspath(self._path))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                missing = self._num_missing
                assert missing == 0, f"{missing} bytes of the tensors in the header are not written"
                # The kernel reports a write error to one sync only, perhaps to an earlier one.
                self._syncing.result()
                os.fsync(self._file.fileno())
                for key, hashed in self._copied.items():
                    self._copied[key] = hashed if isinstance(hashed, bytes) else hashed.result()
        finally:
            for pool in (self._hashing, self._disk):
                pool.shutdown(cancel_futures=True)
            self._file.close()

    @property
    def sha256(self) -> str:
        """The hash of the complete file."""
        return self._digest.hexdigest() if self._in_order else compute_sha256(self._path)

    @property
    def copied_hashes(self) -> dict[str, bytes]:
        """The sha256 of each copied tensor by key, after the file is complete."""
        return {key: digest for key, digest in self._copied.items() if isinstance(digest, bytes)}

    @property
    def has_only_copies(self) -> bool:
        """True if all tensors of the file were copied."""
        return bool(self._copied) and self._copied.keys() == self._tensors.keys()

    @property
    def sha256_of_tensors(self) -> str:
        """The hash of the header followed by all tensors' hashes; needs `has_only_copies`."""
        hashes = self.copied_hashes
        return _combine_hashes(self._header, [hashes[key] for key in self._tensors])


def sha256_of_tensors(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Hash a file as `Writer.sha256_of_tensors` does; several threads hash tensors.

    The hash of a tensor does not depend on the file, so a save that copies a tensor again can pass
    the known hash to `Writer.copy`. `on_read` is called with the size of each tensor that was read.
    """
    tensors, _ = read_header(path)
    with path.open("rb") as file:
        header = file.read(min((tensor.start for tensor in tensors.values()), default=-1))
    digests = []
    with ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="hf_moe_ep hashes") as pool:
        for tensor, digest in zip(tensors.values(), pool.map(hash_tensor, tensors.values())):
            digests.append(digest)
            if on_read is not None:
                on_read(tensor.nbytes)
    return _combine_hashes(header, digests)


def _combine_hashes(header: bytes, digests: Iterable[bytes]) -> str:
    return hashlib.sha256(header + b"".join(digests)).hexdigest()


def hash_tensor(tensor: FileTensor) -> bytes:
    """Return the sha256 of the bytes of a tensor in a file."""
    digest, remaining = hashlib.sha256(), tensor.nbytes
    buffer = memoryview(bytearray(min(_HASH_BLOCK_BYTES, remaining)))
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        while remaining:
            count = file.readinto(buffer[:remaining])
            if not count:
                raise _make_truncated_error(tensor.file, tensor.start + tensor.nbytes - remaining)
            digest.update(buffer[:count])
            remaining -= count
    return digest.digest()


def _copy_bytes(source: int, target: int, tensor: FileTensor, start: int) -> None:
    """Copy the bytes of a tensor from an open file to the byte `start` of another open file."""
    position, remaining = tensor.start, tensor.nbytes
    kernel_copies = hasattr(os, "copy_file_range")
    buffer = memoryview(b"")
    while remaining:
        size, count = min(remaining, _BYTES_PER_COPY), 0
        if kernel_copies:
            try:
                count = os.copy_file_range(source, target, size, position, start)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
            # Some file systems return 0 instead of an error.
            kernel_copies = count > 0
        if not kernel_copies:
            buffer = buffer or memoryview(bytearray(_CHUNK_BYTES))
            count = os.preadv(source, [buffer[: min(size, _CHUNK_BYTES)]], position)
            if count == 0:
                raise _make_truncated_error(tensor.file, position)
            count = os.pwrite(target, buffer[:count], start)
        position, start, remaining = position + count, start + count, remaining - count


def _make_truncated_error(file: Path, position: int) -> ValueError:
    return ValueError(f"{file} ends at byte {position}; it was truncated during the read")
