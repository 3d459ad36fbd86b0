"""Files of torch.distributed.checkpoint (torch/distributed/checkpoint/filesystem.py)."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader


def metadata_path(reader: FileSystemReader, rank: int | None) -> Any:
    """Return the path of a checkpoint's metadata: of one rank, or None for that of all ranks."""
    return reader._get_metadata_path(rank)
