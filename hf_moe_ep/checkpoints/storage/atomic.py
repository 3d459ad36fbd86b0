"""Files and folders that survive a kill and a power cut: all of the new one, or the old one."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def check_is_free(target: Path) -> None:
    """Raise ValueError where a folder to be written is there and not empty, or cannot be made."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"target {target} exists and is not empty; name another folder")
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir():
        raise ValueError(f"target {target} lies in {above}, which is a file; name another folder")


def check_can_appear(target: Path) -> None:
    """Raise ValueError where `whole_folder` cannot make a folder."""
    check_is_free(target)
    if target.is_mount():
        raise ValueError(
            f"target {target} is where a disk is mounted, which no folder can be renamed to; name "
            f"a folder on it, {target / 'model'}"
        )


def partial_folder(target: Path) -> str:
    """Return how the name begins of what `whole_folder` writes to."""
    return f".{target.name}.partial-"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target`, which is renamed to it where the block ends.

    An error in the block removes it; what a kill leaves is called `.NAME.partial-PID`.
    """
    check_can_appear(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{partial_folder(target)}{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process with the same number
    beside.mkdir()
    try:
        yield beside
        sync_folder(beside)
        beside.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


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
