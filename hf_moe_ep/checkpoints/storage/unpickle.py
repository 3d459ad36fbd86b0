"""Load checkpoints of torch.distributed.checkpoint (DCP) without running code from their files.

DCP writes two kinds of pickles, and torch runs the code in them when it loads them:

    .metadata       names and positions of all tensors (filesystem.py, read_metadata)
    __0_0.distcp    tensors, and "byte items": an optimizer's options, lr, betas, ..
                    (default_planner.py, load_bytes: torch.load with weights_only=False)

In `.metadata`, this module allows only the classes in `_MAY_BUILD`. It loads a byte item with
weights_only=True, which allows numbers, strings, tuples, lists, dicts and tensors; numpy's numbers
(such as an lr that numpy computed) are allowed, too. For anything else a ValueError names the file.
A class of the user is allowed after torch.serialization.add_safe_globals([TheClass]).

This package calls `torch.distributed.checkpoint.load` with `ValuesPlanner` and `MetadataReader`.
Accelerate creates its own planner and reader, so `loading_values` first reads all pickles of a
folder with the classes of this module; pickles are small. No function of torch is replaced.

Files that DCP does not read are not checked: Accelerate loads `custom_checkpoint_*.pkl`, the state
of objects that were registered for checkpointing, with weights_only=False.
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

from hf_moe_ep.ranks.all_ranks import format_in_one_line, run_on_first
from hf_moe_ep.upstream.checkpoint_files import find_file_of_item, make_metadata_path, put_value

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
# numpy pickles a number as a call of this function, which has another name in numpy 1.
_SCALAR = numpy.float64(0).__reduce__()[0]
# Classes of byte items that torch.load(weights_only=True) does not allow by default.
_NUMPY_NUMBERS: list[Any] = [
    (_SCALAR, "numpy._core.multiarray.scalar"),
    (_SCALAR, "numpy.core.multiarray.scalar"),
    numpy.dtype,
    *(type(numpy.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")),
]
# The errors that a pickle raises if it is damaged or has content that is not allowed.
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


def _get_enum_member(owner: Any, name: str) -> Any:
    """Return a member of an Enum, which Python up to 3.11.3 pickles as getattr(class, name)."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is not allowed in a checkpoint")


class _Unpickler(pickle.Unpickler):
    """Builds only the classes of a `.metadata`, and raises UnpicklingError for others."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = (module, name)
        is_torch_constant = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout
        )
        if full_name == ("builtins", "getattr"):
            return _get_enum_member
        if full_name in _MAY_BUILD or is_torch_constant:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{module}.{name} is not allowed in the metadata of a checkpoint; this is another kind "
            f"of file, or someone put code into it"
        )


def _load_value(planner: Any, item: ReadItem, value: io.BytesIO) -> None:
    """Load a byte item as DefaultLoadPlanner.load_bytes does, but only plain values.

    Raises:
        ValueError: the item holds other objects, or is damaged.
    """
    known = torch.serialization.get_safe_globals()
    allowed = [number_class for number_class in _NUMPY_NUMBERS if number_class not in known]
    try:
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(value, weights_only=True)
    except _UNREADABLE as error:
        file = Path(
            planner.metadata.storage_meta.checkpoint_id or "", find_file_of_item(planner, item)
        )
        raise ValueError(
            f"{file} cannot be loaded: its item {item.storage_index.fqn} is not a plain value, so "
            f"loading it could run code that someone put into the file, or the file is damaged "
            f"({_describe_reason(error)}); load an older checkpoint, or allow a class of your own "
            f"by torch.serialization.add_safe_globals"
        ) from error
    put_value(planner, item.dest_index.fqn, loaded)


def _describe_reason(error: Exception) -> str:
    """Return torch.load's reason in one line, without its advice to load the file unsafely."""
    cause = error.__context__ or error
    return " ".join(str(cause).split()) or repr(cause)


class MetadataReader(FileSystemReader):
    """Reads a folder as DCP's reader does, but builds only metadata classes from `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`; raise ValueError if it holds other classes, or is damaged."""
        path = make_metadata_path(self, kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                loaded = _Unpickler(file).load()
                loaded.storage_meta = loaded.storage_meta or StorageMeta()
                loaded.storage_meta.load_id = self.load_id
                # The file names the folder of the save. Errors must name the folder that is read
                # now.
                loaded.storage_meta.checkpoint_id = os.fspath(self.path)
            except _UNREADABLE as error:
                raise ValueError(
                    f"{path} cannot be loaded: {error}; load an older checkpoint"
                ) from error
        return loaded


class ValuesPlanner(DefaultLoadPlanner):
    """Plans a load as DCP's planner does, but loads only plain values from byte items."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_value(self, read_item, value)


def check_values(folder: Path) -> None:
    """Check that all DCP pickles in a folder and its subfolders hold only plain values.

    Raises:
        ValueError: a file holds other objects, or is damaged; the error names the file.
    """
    metadata_files = (folder / METADATA_FILE, *sorted(folder.glob(f"*/{METADATA_FILE}")))
    for file in (path for path in metadata_files if path.exists()):
        reader, planner = MetadataReader(file.parent), ValuesPlanner()
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata.items()
        items = {name: 0 for name, entry in entries if isinstance(entry, BytesStorageMetadata)}
        planner.set_up_planner(items, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()


@contextmanager
def loading_values(folder: Path) -> Iterator[None]:
    """Check the pickles of a folder, which Accelerate then loads with DCP inside the block.

    Rank 0 checks the pickles for all ranks, because all ranks load the same files.

    Raises:
        ValueError: on every rank, as in `check_values`.
        RuntimeError: loading failed for another reason. This error replaces DCP's
            CheckpointException, which is not derived from Exception, so few callers would catch it.
    """
    run_on_first(f"loading {folder}", lambda: check_values(folder))
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(f"loading a checkpoint failed on {format_in_one_line(error)}") from error
