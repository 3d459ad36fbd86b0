"""DCP's pickled `.metadata`, which may build metadata and nothing else.

torch runs whatever is in that file (torch/distributed/checkpoint/filesystem.py, read_metadata).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hf_moe_ep.ranks.together import one_line
from hf_moe_ep.upstream.checkpoint_files import metadata_path

_METADATA = "torch.distributed.checkpoint.metadata"
# What a DCP `.metadata` is made of (torch/distributed/checkpoint/metadata.py, filesystem.py).
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


def _member(owner: Any, name: str) -> Any:
    """Look up an Enum's member, which Python up to 3.11.3 pickles as getattr(class, name)."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) has no place in a checkpoint")


class _Unpickler(pickle.Unpickler):
    """Builds what a `.metadata` is made of; anything else in the file is an error."""

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
            f"{module}.{name} has no place in the metadata of a checkpoint; the file is not one, "
            f"or someone put code into it"
        )


def _read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
    path = metadata_path(self, kwargs.get("rank"))
    with self.fs.create_stream(path, "rb") as file:
        found: Metadata = _Unpickler(file).load()
    found.storage_meta = found.storage_meta or StorageMeta()
    found.storage_meta.load_id = self.load_id
    return found


class MetadataReader(FileSystemReader):
    """torch's reader of a checkpoint by DCP, with metadata alone out of `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _read_metadata(self, *args, **kwargs)


@contextmanager
def metadata_alone() -> Iterator[None]:
    """Keep torch's own reader from unpickling whatever is in the file (filesystem.py)."""
    name = "read_metadata"
    stock = getattr(FileSystemReader, name)
    setattr(FileSystemReader, name, _read_metadata)
    try:
        yield
    except CheckpointException as error:  # no Exception, so that few would catch it
        raise RuntimeError(f"loading a checkpoint failed on {one_line(error)}") from error
    finally:
        setattr(FileSystemReader, name, stock)
