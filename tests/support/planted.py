"""Put code into a checkpoint of torch.distributed.checkpoint, as an attacker would."""

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hf_moe_ep.checkpoints.storage.unpickle import MetadataReader


class Shell:
    """An object that makes a folder when it is unpickled, which must never happen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (os.fspath(self.folder),)


def plant(folder: Path, trace: Path) -> Path:
    """Replace an item of a checkpoint by a pickle that makes the folder `trace` when it is loaded.

    The pickle is appended to a .distcp file, and `.metadata` then says that the item is there.

    Returns:
        The path of the .distcp file.
    """
    metadata = MetadataReader(folder).read_metadata()
    index = next(
        index
        for index in metadata.storage_data
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
    )
    stored = metadata.storage_data[index]
    file, code = folder / stored.relative_path, io.BytesIO()
    torch.save(Shell(trace), code)
    moved = replace(stored, offset=file.stat().st_size, length=len(code.getvalue()))
    with file.open("ab") as end:
        end.write(code.getvalue())
    metadata.storage_data[index] = moved
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return file
