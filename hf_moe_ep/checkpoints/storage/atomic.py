"""Replace files and folders so that a kill or a power cut leaves the old or the new content."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK_BYTES = 4 << 20


def make_partial_path(path: Path) -> Path:
    """Return the path at which `write_atomically` writes a file before the rename."""
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name, then rename it; only one process may write the file."""
    partial = make_partial_path(path)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def check_is_not_a_file(folder: Path) -> None:
    """Raise ValueError if a folder cannot be made because its path, or a parent's, is a file."""
    paths = (folder.absolute(), *folder.absolute().parents)
    lowest = next(path for path in paths if path.exists())
    if lowest.is_dir():
        return
    if lowest == paths[0]:
        raise ValueError(f"target {folder} is a file; name another folder")
    raise ValueError(f"target {folder} lies in {lowest}, which is a file; name another folder")


def check_folder_can_be_made(target: Path) -> None:
    """Raise ValueError if `make_folder_atomically` cannot make the folder `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"target {target} exists and is not empty; name another folder")
    check_is_not_a_file(target)
    if target.is_mount():
        raise ValueError(
            f"target {target} is a mount point, to which no folder can be renamed; name a folder "
            f"on that disk, like {target / 'model'}"
        )


def get_partial_folder_prefix(target: Path) -> str:
    """Return the prefix of the temporary folders that `make_folder_atomically` makes."""
    return f".{target.name}.partial-"


@contextmanager
def make_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target` that is renamed to `target` when the block ends.

    An error in the block removes the folder. A kill leaves it under the name `.NAME.partial-PID`.
    """
    check_folder_can_be_made(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f"{get_partial_folder_prefix(target)}{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process with the same id
    folder.mkdir()
    try:
        yield folder
        sync_folder(folder)
        folder.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_sha256(path: Path, on_read: Callable[[int], object] | None = None) -> str:
    """Hash a file; after each read `on_read` is called with the number of bytes that were read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_read is not None:
                on_read(count)
    return digest.hexdigest()
