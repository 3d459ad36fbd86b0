"""Load checkpoints of torch.distributed.checkpoint (DCP) without running code from their files.

DCP writes two kinds of pickles, and torch runs the code in them when it loads them:

    .metadata       names and positions of all tensors (filesystem.py, read_metadata)
    __0_0.distcp    besides tensors "byte items": an optimizer's options, lr, betas, ..
                    (default_planner.py, load_bytes: torch.load with weights_only=False)

Here `.metadata` may build the classes in `_MAY_BUILD` only. A byte item is loaded with
weights_only=True: numbers, strings, tuples, lists, dicts, tensors, and numpy's numbers (such as an
lr that numpy computed). Anything else is a ValueError that names the file. A user's class is loaded
after torch.serialization.add_safe_globals([TheClass]).

`ValuesPlanner` and `MetadataReader` are for calls of `torch.distributed.checkpoint.load` that this
package makes. Accelerate makes its own planner and reader, so `loading_values` reads all pickles of
a folder by ours first; they are small. Nothing of torch is replaced.

The check does not cover files that DCP does not read: Accelerate loads `custom_checkpoint_*.pkl`,
the state of objects that were registered for checkpointing, with weights_only=False.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from hf_moe_ep.ranks.together import on_first, one_line
from hf_moe_ep.upstream.checkpoint_files import file_of_item, metadata_path, put_value

METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
# The classes in a DCP `.metadata` (torch/distributed/checkpoint/metadata.py, filesystem.py).
_MAY_BUILD = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
# numpy pickles a number as a call of this function; numpy 1 has another name for it.
_SCALAR = numpy.float64(0).__reduce__()[0]
# The classes of a byte item that torch.load(weights_only=True) does not allow by itself.
_NUMPY_NUMBERS: list[Any] = [
    (_SCALAR, "numpy._core.multiarray.scalar"),
    (_SCALAR, "numpy.core.multiarray.scalar"),
    numpy.dtype,
    *(type(numpy.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")),
]
# Errors of reading a pickle that is damaged or has refused content.
_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ValueError,
)


def _member(owner: Any, name: str) -> Any:
    """Return an Enum's member, which Python up to 3.11.3 pickles as getattr(class, name)."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) has no place in a checkpoint")


class _Unpickler(pickle.Unpickler):
    """Builds the classes of a `.metadata`; anything else in the file is an error."""

    def find_class(self, module: str, name: str) -> Any:
        whole = (module, name)
        is_torch_constant = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout
        )
        if whole == ("builtins", "getattr"):
            return _member
        if whole in _MAY_BUILD or is_torch_constant:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{module}.{name} has no place in the metadata of a checkpoint; this is another file, "
            f"or someone put code into it"
        )


def _build_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
    """Read `.metadata` as FileSystemReader.read_metadata does, but build only metadata classes.

    Raises:
        ValueError: the file holds other classes, or is damaged.
    """
    path = metadata_path(self, kwargs.get("rank"))
    with self.fs.create_stream(path, "rb") as file:
        try:
            found = _Unpickler(file).load()
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            # For errors: the folder that is read now. The file names the one it was written to.
            found.storage_meta.checkpoint_id = os.fspath(self.path)
        except _UNREADABLE as error:
            raise ValueError(
                f"{path} cannot be loaded: {error}; take an older checkpoint"
            ) from error
    metadata: Metadata = found
    return metadata


def _load_value(planner: Any, item: ReadItem, value: io.BytesIO) -> None:
    """Load a byte item as DefaultLoadPlanner.load_bytes does, but only plain values.

    Raises:
        ValueError: the item holds other objects, or is damaged.
    """
    known = torch.serialization.get_safe_globals()
    allowed = [one for one in _NUMPY_NUMBERS if one not in known]
    try:
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(value, weights_only=True)
    except _UNREADABLE as error:
        file = Path(planner.metadata.storage_meta.checkpoint_id or "", file_of_item(planner, item))
        raise ValueError(
            f"{file} cannot be loaded: its item {item.storage_index.fqn} is no plain value, so "
            f"loading it could run code that someone put into it, or it is damaged "
            f"({_reason(error)}); take an older checkpoint, or allow a class of your own by "
            f"torch.serialization.add_safe_globals"
        ) from error
    put_value(planner, item.dest_index.fqn, loaded)


def _reason(error: Exception) -> str:
    """Return torch.load's reason in one line, without its advice to load the file unsafely."""
    cause = error.__context__ or error
    return " ".join(str(cause).split()) or repr(cause)


class MetadataReader(FileSystemReader):
    """DCP's reader of a folder; builds only metadata classes from `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _build_metadata(self, *args, **kwargs)


class ValuesPlanner(DefaultLoadPlanner):
    """DCP's planner of a load; loads only plain values from byte items."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_value(self, read_item, value)


def check_values(folder: Path) -> None:
    """Read all pickles of DCP in a folder and in the folders inside it, but build values alone.

    Raises:
        ValueError: a file holds something else, or is damaged; the error names the file.
    """
    found = (folder / METADATA_FILE, *sorted(folder.glob(f"*/{METADATA_FILE}")))
    for file in (path for path in found if path.exists()):
        reader, planner = MetadataReader(file.parent), ValuesPlanner()
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata.items()
        items = {name: 0 for name, one in entries if isinstance(one, BytesStorageMetadata)}
        planner.set_up_planner(items, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()


@contextmanager
def loading_values(folder: Path) -> Iterator[None]:
    """Check the pickles of a folder, which Accelerate then loads inside the block by torch's DCP.

    Rank 0 checks them for all ranks, which load the same files.

    Raises:
        ValueError: on every rank, as `check_values`.
        RuntimeError: loading failed for another reason, where DCP's error is no Exception, so that
            few callers would catch it.
    """
    on_first(f"loading {folder}", lambda: check_values(folder))
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(f"loading a checkpoint failed on {one_line(error)}") from error
