"""Files of torch.distributed.checkpoint (torch/distributed/checkpoint/filesystem.py)."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader


def metadata_path(reader: FileSystemReader, rank: int | None) -> Any:
    """Where a checkpoint keeps its metadata (torch/distributed/checkpoint/filesystem.py)."""
    return reader._get_metadata_path(rank)
