"""Replace several files of a folder at one moment, so that a kill leaves all old or all new files.

A rename replaces one file, but a checkpoint has at least two files that must fit each other:
config.json describes the shards that model.safetensors.index.json names. `switch_files` therefore
first replaces both files by symbolic links that lead through a second link, `current`. One rename
of `current` then replaces both files. This rename is the commit:

    config.json                  ->  .switch-3f9c21ab/current/config.json
    model.safetensors.index.json ->  .switch-3f9c21ab/current/model.safetensors.index.json
    .switch-3f9c21ab/current     ->  old, then new

Every reader follows these links, transformers too, and finds the old files until the commit. If the
new checkpoint lacks a file, such as model.safetensors, the link of this file leads to nothing after
the commit, so the file disappears at the same moment. At the end `settle` replaces each link by the
file to which the link leads. The contents stay the same, so `settle` can do this link by link.
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


def list_changed_files(folder: Path, staged: Path) -> list[Path]:
    """List the files of `staged`, as relative paths, that are missing or different in `folder`."""
    return [
        name
        for name in _list_files(staged)
        if not (folder / name).is_file()
        or not filecmp.cmp(folder / name, staged / name, shallow=False)
    ]


def switch_files(folder: Path, staged: Path, to_remove: Iterable[str] = ()) -> bool:
    """Move all files of `staged` into `folder`, and remove other files of `folder`, at one moment.

    Args:
        folder: contains all old files or all new files, even if the process is killed.
        staged: a folder on the same disk; it is removed at the end.
        to_remove: names of the files in `folder` to remove; missing files are skipped.

    Returns:
        True if the files were replaced. False if the file system has no links, so that nothing was
        changed.
    """
    switch = folder / f"{SWITCH}{uuid.uuid4().hex[:8]}"
    new = _list_files(staged)
    names = [*new, *(Path(name) for name in to_remove if (folder / name).exists())]
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
        path.parent.mkdir(parents=True, exist_ok=True)
        _set_link(switch, os.path.relpath(switch / _CURRENT / name, path.parent), path)
        sync_folder(path.parent)
    _set_link(switch, _NEW, switch / _CURRENT)
    sync_folder(switch)
    settle(folder)
    return True


def settle(folder: Path) -> None:
    """Replace the links that `switch_files` made in `folder` by the files to which they lead.

    The next save calls this function, so that a killed save is completed if it had committed (the
    links lead to the new files), and undone otherwise (the links lead to the old files).
    """
    for switch in folder.glob(f"{SWITCH}*"):
        for name in {*_list_files(switch / _OLD), *_list_files(switch / _NEW)}:
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
    """Make `old` a second name of `file`, by a hard or symbolic link, unless `file` is missing."""
    old.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink() and file.exists():  # the hub's cache has such links
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
    """Replace `path` by a symbolic link to `target`, with one rename."""
    link = switch / _LINK
    link.symlink_to(target)
    link.replace(path)


def _list_files(folder: Path) -> list[Path]:
    """List the files and links under a folder as relative paths; [] for a missing folder."""
    paths = folder.rglob("*")
    return sorted(p.relative_to(folder) for p in paths if p.is_symlink() or p.is_file())
