"""Replace several files of a folder at one moment: a kill leaves all old files or all new files.

A rename replaces one file, but a checkpoint has at least two: config.json describes the shards that
model.safetensors.index.json names. So both become symbolic links into a folder whose `current` is
itself a link. Replacing this link is one rename, the commit:

    config.json                  ->  .switch-3f9c21ab/current/config.json
    model.safetensors.index.json ->  .switch-3f9c21ab/current/model.safetensors.index.json
    .switch-3f9c21ab/current     ->  old, then new

Every reader follows these links, transformers too, and finds the old files until the commit. A file
that the new checkpoint lacks, such as model.safetensors, is a link to a missing file after the
commit, so it disappears at the same moment. At the end files replace the links one by one; a reader
finds the same contents before and after each of these renames.
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
# Errors of file systems without symbolic or hard links.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EMLINK)


def changed_files(folder: Path, staged: Path) -> list[Path]:
    """List the files of `staged`, as relative paths, that `folder` lacks or that differ there."""
    return [
        name
        for name in _files(staged)
        if not (folder / name).is_file()
        or not filecmp.cmp(folder / name, staged / name, shallow=False)
    ]


def switch_files(folder: Path, staged: Path, gone: Iterable[str] = ()) -> bool:
    """Move all files of `staged` into `folder` and remove those called `gone`, at one moment.

    Args:
        folder: if the process is killed at any moment, all old or all new files are here.
        staged: a folder on the same disk; it is removed at the end.
        gone: names of files in `folder` to remove.

    Returns:
        False if the file system has no links; then nothing was changed.
    """
    switch = folder / f"{SWITCH}{uuid.uuid4().hex[:8]}"
    new = _files(staged)
    names = [*new, *(Path(name) for name in gone if (folder / name).exists())]
    switch.mkdir()
    try:
        (switch / _CURRENT).symlink_to(_OLD)
        for name in names:
            _link_old(folder / name, switch / _OLD / name)
    except OSError as error:
        shutil.rmtree(switch)
        if error.errno in _NO_LINKS:
            return False
        raise
    for name in new:
        _move(staged / name, switch / _NEW / name)
    shutil.rmtree(staged)
    sync_folder(switch)
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        _set_link(switch, os.path.relpath(switch / _CURRENT / name, path.parent), path)
        sync_folder(path.parent)
    _set_link(switch, _NEW, switch / _CURRENT)
    sync_folder(switch)
    settle(folder)
    return True


def settle(folder: Path) -> None:
    """Replace the links that `switch_files` made in `folder` by files, also after a kill."""
    for switch in folder.glob(f"{SWITCH}*"):
        for name in {*_files(switch / _OLD), *_files(switch / _NEW)}:
            path, current = folder / name, switch / _CURRENT / name
            if not path.is_symlink() or switch.name not in Path(os.readlink(path)).parts:
                continue
            if os.path.lexists(current):
                current.replace(path)
            else:
                path.unlink()
            sync_folder(path.parent)
        shutil.rmtree(switch)


def _link_old(file: Path, old: Path) -> None:
    """Give a file, if it exists, the second name `old`."""
    old.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink() and file.exists():  # as in the hub's cache
        old.symlink_to(file.resolve())
    elif file.exists():
        os.link(file, old)


def _move(file: Path, target: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)
    sync_folder(target.parent)


def _set_link(switch: Path, target: str, path: Path) -> None:
    """Make `path` a link to `target`, by one rename."""
    link = switch / _LINK
    link.symlink_to(target)
    link.replace(path)


def _files(folder: Path) -> list[Path]:
    """List the files and links under a folder as relative paths; [] if it is missing."""
    found = folder.rglob("*")
    return sorted(p.relative_to(folder) for p in found if p.is_symlink() or p.is_file())
