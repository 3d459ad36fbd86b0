"""A checkpoint folder is complete, or it is not there.

`manifest.json` is written last, by rank 0, and names every other file of its folder:

    {"format": 1,
     "number": 7,
     "written": {"time": 1767225600.0, "hf_moe_ep": "0.1.0", "torch": ..., "transformers": ...},
     "layout": {"world_size": 8, "ep_size": 4, ...},
     "files": {"tensors/shard-00001-...": {"size": 1234, "sha256": "..."}, ...}}

Until its rename the folder counts as unfinished, so killing any rank at any moment leaves the
previous checkpoint the newest. Each file is read once, by one rank, in pieces, unless its writer
has hashed it; either way it is on disk (fsync) first, because a manifest that survives a power
failure must not name files that did not.

The number is one more than the highest in the folders beside this one: `order.py` chooses by it
which checkpoint is the newest. Manifests of older versions have none.

Files that came to the folder later are not looked at, and a checkpoint is not protected against
someone who means harm: who can change a file can change the manifest.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_moe_ep.checkpoints.storage.atomic import (
    partial_name,
    sha256_of,
    sync_folder,
    write_atomically,
)
from hf_moe_ep.checkpoints.storage.order import Saved, newest_last
from hf_moe_ep.ranks.together import for_first, on_first, this_rank, together, world_size

MANIFEST = "manifest.json"
# Written first: tells our unfinished checkpoint from one that never had a manifest.
STARTED = "hf_moe_ep.json"
PARTIAL = partial_name(Path(MANIFEST)).name
_FORMAT = 1


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is a checkpoint with a manifest, or one that was not finished."""
    return Path(folder, MANIFEST).exists() or Path(folder, STARTED).exists()


def begin(folder: str | os.PathLike[str]) -> None:
    """Declare a folder unfinished: from here to `write` no reader takes it; one rank calls this."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    with open(path / STARTED, "w", encoding="utf-8") as file:
        json.dump(versions(), file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)


def write(
    folder: str | os.PathLike[str],
    layout: dict[str, Any],
    *,
    told: dict[str, dict[str, Any]] | None = None,
    belongs: Callable[[str], bool] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Hash every file of `folder`, shared among ranks, then commit; every rank calls this.

    Args:
        folder: seen by all ranks; nobody writes to it any more.
        layout: what wrote it, for the reader; JSON values.
        told: of files that this rank wrote, has on disk, and hashed as it wrote them.
        belongs: tells a file of the checkpoint by its path in the folder from one that others keep
            there; None takes all files.
        group: over which ranks meet; None is the default group.

    Raises:
        RuntimeError: on every rank, naming the rank that failed and why; no manifest was written.
    """
    path = Path(folder)
    known: dict[str, dict[str, Any]] = {}
    if told is not None:
        for of_rank in for_first(f"writing {path / MANIFEST}", lambda: told, group) or ():
            known |= of_rank
    sizes = on_first("the list of files", lambda: _list(path, known, belongs), group)
    parts = for_first(
        f"writing {path / MANIFEST}",
        lambda: {name: _entry(path, name) for name in _share(sizes, group)},
        group,
    )

    def commit() -> None:
        found = known | {name: entry for part in parts or () for name, entry in part.items()}
        manifest = {
            "format": _FORMAT,
            "number": 1 + max(_numbers_beside(path), default=0),
            "written": {"time": time.time(), **versions()},
            "layout": layout,
            "files": {name: found[name] for name in sorted(found)},
        }
        _commit(path, manifest)

    on_first(f"writing {path / MANIFEST}", commit, group)


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a complete checkpoint.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _check_fields(path, found)
    except FileNotFoundError as error:
        raise ValueError(
            f"{Path(folder)} has no {MANIFEST}: this checkpoint was not finished; take an older one"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, AttributeError, TypeError) as e:
        raise ValueError(f"{path} is damaged ({e}); take an older checkpoint") from e
    return dict(found)


def _check_fields(path: Path, found: dict[str, Any]) -> None:
    if found["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {found['format']}, this version reads {_FORMAT}; load it with "
            f"hf_moe_ep {found['written']['hf_moe_ep']}"
        )
    for entry in found["files"].values():
        if not isinstance(entry["size"], int) or not isinstance(entry["sha256"], str):
            raise TypeError(f"no size or sha256 in {entry}")
    float(found["written"]["time"])
    if not isinstance(found.get("number", 0), int):
        raise TypeError(f"the number is {found['number']!r}")


def check(
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    on_read: Callable[[int], object] | None = None,
) -> None:
    """Read every file of a checkpoint against its manifest; every rank calls this.

    `on_read` is told the bytes of each piece that this rank has read.

    Raises:
        ValueError: on every rank; the first file that is missing, too short or changed, with what
            the manifest says and what was found.
    """
    path = Path(folder)

    def part() -> None:
        files = read(path)["files"]
        share = _share({name: entry["size"] for name, entry in files.items()}, group)
        _compare_sizes(path, {name: files[name] for name in share})
        for name in share:
            wanted, got = files[name]["sha256"], sha256_of(path / name, on_read)
            if got != wanted:
                raise ValueError(
                    f"{path / name} has changed since it was written: sha256 {got}, {MANIFEST} "
                    f"says {wanted}; take an older checkpoint"
                )

    together(f"reading {path}", part, group)


def check_sizes(folder: str | os.PathLike[str]) -> None:
    """Check as `check` does, but by sizes alone, without reading the files."""
    _compare_sizes(Path(folder), read(folder)["files"])


def newest_complete(root: str | os.PathLike[str]) -> Path:
    """Find the newest complete checkpoint in `root`, or `root` itself; sizes only.

    Raises:
        ValueError: there is none; it lists what was there instead.
    """
    path = Path(root)
    if is_ours(path):
        check_sizes(path)
        return path
    complete, others = complete_in(path)
    if not complete:
        what = "\n".join(f"  {why}" for why in others.values()) or (
            "  no folders in it" if path.is_dir() else "  it does not exist"
        )
        raise ValueError(f"no complete checkpoint in {path}:\n{what}")
    return complete[-1]


def complete_in(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """List the complete checkpoints in `root`, the newest last, and why other folders are none."""
    complete: list[Saved] = []
    others: dict[Path, str] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir():
            continue
        try:
            check_sizes(folder)
        except (ValueError, PermissionError) as error:  # lost+found is root's
            others[folder] = str(error)
        else:
            complete.append(saved(folder))
    return newest_last(complete), others


def saved(folder: Path) -> Saved:
    """Read what orders a checkpoint among those beside it; ValueError where it is not complete."""
    found = read(folder)
    return Saved(folder, found.get("number", 0), found["written"]["time"])


def _numbers_beside(folder: Path) -> Iterator[int]:
    """Yield the numbers of the complete checkpoints beside a folder."""
    beside = folder.absolute().parent
    for other in beside.iterdir():
        if other.name == folder.name or not other.is_dir():
            continue
        try:
            yield saved(other).number
        except (ValueError, OSError):  # no checkpoint, a torn one, or a folder that is root's
            continue


def versions() -> dict[str, str]:
    """The versions of the packages that a checkpoint depends on."""
    found = {}
    for package in ("hf_moe_ep", "torch", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "from source"
    return found


def _list(
    folder: Path, known: dict[str, dict[str, Any]], belongs: Callable[[str], bool] | None
) -> dict[str, int]:
    """List sizes of files that are to be read; of what is known the size has to be as told."""
    files = (path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    _compare_sizes(folder, known)
    return {
        name: size
        for name, size in sizes.items()
        if name not in (MANIFEST, PARTIAL)
        and name not in known
        and (belongs is None or belongs(name))
    }


def _share(sizes: dict[str, int], group: dist.ProcessGroup | None) -> list[str]:
    """Choose this rank's files: the largest first, each to the rank with least to read."""
    load, mine = [(0, rank) for rank in range(world_size(group))], []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        so_far, rank = load[0]
        heapq.heapreplace(load, (so_far + sizes[name] + 1, rank))
        if rank == this_rank():
            mine.append(name)
    return mine


def _entry(folder: Path, name: str) -> dict[str, Any]:
    with open(folder / name, "rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return {"size": size, "sha256": sha256_of(folder / name)}


def _compare_sizes(folder: Path, files: dict[str, Any]) -> None:
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder / name} is missing, {MANIFEST} says {entry['size']} bytes; take an older "
                f"checkpoint"
            ) from error
        if size != entry["size"]:
            raise ValueError(
                f"{folder / name} has {size} bytes, {MANIFEST} says {entry['size']}; take an older "
                f"checkpoint"
            )


def _commit(folder: Path, manifest: dict[str, Any]) -> None:
    for parent in {(folder / name).parent for name in manifest["files"]}:
        sync_folder(parent)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
