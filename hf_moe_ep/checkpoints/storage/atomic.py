"""Files that survive a kill and a power cut: all of the new one, or the old one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_PIECE = 4 << 20  # bytes


def partial_name(path: Path) -> Path:
    """Name where `write_atomically` writes first; what a kill leaves is overwritten."""
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, then rename; one process at a time."""
    beside = partial_name(path)
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Hash a file, read in pieces; `on_read` is told the bytes of each."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            if on_read is not None:
                on_read(count)
    return digest.hexdigest()
