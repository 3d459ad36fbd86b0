"""Replace several files of a folder at one moment, so that a kill leaves all old or all new ones.

A rename replaces one file, and a checkpoint is at least two: config.json describes the shards that
model.safetensors.index.json names. So both become symbolic links into a folder, whose `current` is
itself a link; to turn that is one rename, the commit:

    config.json                  ->  .switch-3f9c21ab/current/config.json
    model.safetensors.index.json ->  .switch-3f9c21ab/current/model.safetensors.index.json
    .switch-3f9c21ab/current     ->  old, then new

Every reader follows these links, stock transformers too, and until the commit it finds the old
files behind them. A file that the new checkpoint lacks, like a model.safetensors, has a link that
leads nowhere after the commit, so it is gone at the same moment. In the end files replace the
links one by one; a reader finds the same contents before and after each of these renames.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from hf_moe_ep.checkpoints.storage.atomic import sync_folder

SWITCH = ".switch-"
_OLD, _NEW, _CURRENT, _LINK = "old", "new", "current", "link"
# What systems say that have no symbolic or no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EMLINK)


def changed_files(folder: Path, staged: Path) -> list[Path]:
    """List the files in `staged` that `folder` lacks or has with other contents, relative to it."""
    return [
        name
        for name in _files(staged)
        if not (folder / name).is_file()
        or not filecmp.cmp(folder / name, staged / name, shallow=False)
    ]


def switch_files(folder: Path, staged: Path, gone: Iterable[str] = ()) -> bool:
    """Move all files of `staged` into `folder` and remove those called `gone`, at one moment.

    Args:
        folder: a process killed at any moment leaves either all of its old files, or all new ones.
        staged: a folder on the same disk; it is empty and removed afterwards.
        gone: names of files in `folder` that do not belong to the new ones.

    Returns:
        False where the file system has no links; then nothing was changed.
    """
    beside = folder / f"{SWITCH}{uuid.uuid4().hex[:8]}"
    new = _files(staged)
    names = [*new, *(Path(name) for name in gone if (folder / name).exists())]
    beside.mkdir()
    try:
        (beside / _CURRENT).symlink_to(_OLD)
        for name in names:
            _keep(folder / name, beside / _OLD / name)
    except OSError as error:
        shutil.rmtree(beside)
        if error.errno in _NO_LINKS:
            return False
        raise
    for name in new:
        _move(staged / name, beside / _NEW / name)
    shutil.rmtree(staged)
    sync_folder(beside)
    for name in names:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        _set_link(beside, os.path.relpath(beside / _CURRENT / name, place.parent), place)
        sync_folder(place.parent)
    _set_link(beside, _NEW, beside / _CURRENT)
    sync_folder(beside)
    settle(folder)
    return True


def settle(folder: Path) -> None:
    """Put files in the place of the links in `folder` that `switch_files` or its kill has left."""
    for beside in folder.glob(f"{SWITCH}*"):
        for name in {*_files(beside / _OLD), *_files(beside / _NEW)}:
            place, current = folder / name, beside / _CURRENT / name
            if not place.is_symlink() or beside.name not in Path(os.readlink(place)).parts:
                continue
            if os.path.lexists(current):
                current.replace(place)
            else:
                place.unlink()
            sync_folder(place.parent)
        shutil.rmtree(beside)


def _keep(place: Path, kept: Path) -> None:
    """Give an old file, if there is one, a second name."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() and place.exists():  # as in the cache of the hub
        kept.symlink_to(place.resolve())
    elif place.exists():
        os.link(place, kept)


def _move(file: Path, place: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    place.parent.mkdir(parents=True, exist_ok=True)
    file.replace(place)
    sync_folder(place.parent)


def _set_link(beside: Path, target: str, place: Path) -> None:
    """Make `place` a link to `target`, by one rename."""
    link = beside / _LINK
    link.symlink_to(target)
    link.replace(place)


def _files(folder: Path) -> list[Path]:
    """List the files and links under a folder, relative to it; none where it is missing."""
    found = folder.rglob("*")
    return sorted(p.relative_to(folder) for p in found if p.is_symlink() or p.is_file())
