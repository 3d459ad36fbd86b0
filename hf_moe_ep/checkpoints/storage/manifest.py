"""Write and check the manifest of a checkpoint folder, without which a checkpoint is unfinished.

Rank 0 writes `manifest.json` last. The manifest names every other file of the folder:

    {"format": 1,
     "number": 7,
     "written": {"time": 1767225600.0, "hf_moe_ep": "0.1.0", "torch": ..., "transformers": ...},
     "layout": {"world_size": 8, "ep_size": 4, ...},
     "files": {"tensors/shard-00001-...": {"size": 1234, "sha256": "..."}, ...}}

The folder counts as unfinished until the manifest is renamed to its final name. If a rank is killed
at any moment, the previous checkpoint therefore stays the newest. Each file is synced to disk
(fsync) before the manifest is written: if the manifest survives a power failure, so do its files. A
rank may hash a file while it writes the file. Every other file is read and hashed by one rank.

"number" is one more than the highest number in the manifests of the neighbouring folders;
`order.py` uses it to choose the newest checkpoint. Manifests of older versions have no number.

A folder with neither manifest nor marker (`hf_moe_ep.json`) was written by stock code or by an old
version of this package. Files that are added to a folder later are not checked. The manifest does
not protect against an attacker, who can change both the files and the manifest.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_moe_ep.checkpoints.storage.atomic import (
    compute_sha256,
    make_partial_path,
    sync_folder,
    write_atomically,
)
from hf_moe_ep.checkpoints.storage.order import Saved, sort_newest_last
from hf_moe_ep.ranks.all_ranks import (
    find_differing,
    gather_on_first,
    run_on_all,
    run_on_first,
    this_rank,
    world_size,
)
from hf_moe_ep.upstream.requirements import get_installed_version

MANIFEST = "manifest.json"
# This file is written first. It marks a checkpoint of this package, even an unfinished one.
STARTED = "hf_moe_ep.json"
PARTIAL = make_partial_path(Path(MANIFEST)).name
# On NFS, a deleted file that a process still has open gets a name with this prefix.
_DELETED_ON_NFS = ".nfs"
_FORMAT = 1


def is_unfinished(folder: Path) -> bool:
    """Return True if a save of this package began in a folder and did not end."""
    return (folder / STARTED).exists() and not (folder / MANIFEST).exists()


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return True if a folder has a manifest, or is an unfinished checkpoint of this package."""
    return Path(folder, MANIFEST).exists() or Path(folder, STARTED).exists()


def begin(folder: str | os.PathLike[str]) -> None:
    """Mark a folder as unfinished, so that it is not loaded before `write`; one rank calls this."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    with open(path / STARTED, "w", encoding="utf-8") as file:
        # `check_is_shared` tells this save's marker from older ones by the random name.
        json.dump({**versions(), "save": uuid.uuid4().hex}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)


def write(
    folder: str | os.PathLike[str],
    layout: dict[str, Any],
    *,
    written: dict[str, dict[str, Any]] | None = None,
    belongs: Callable[[str], bool] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Hash all files of a folder and write its manifest; every rank calls this.

    Args:
        folder: shared by all ranks, which have finished writing to it.
        layout: the layout of the ranks that wrote the files, as JSON values.
        written: the size and sha256 of files that this rank has already synced and hashed. All
            other files are synced and hashed by `write`, each by one rank.
        belongs: returns True if a path in the folder is part of the checkpoint; None means that
            all files are.
        group: the process group for the exchange; by default, torch's default group.

    Raises:
        RuntimeError: a rank failed; every rank raises the error, which names that rank and the
            reason. No manifest is written.
    """
    path = Path(folder)
    known: dict[str, dict[str, Any]] = {}
    if written is not None:
        for rank_files in (
            gather_on_first(f"writing {path / MANIFEST}", lambda: written, group) or ()
        ):
            known |= rank_files
    sizes = run_on_first(
        f"listing {path}", lambda: _list_files_to_hash(path, known, belongs), group
    )
    parts = gather_on_first(
        f"writing {path / MANIFEST}",
        lambda: {name: _sync_and_hash(path, name) for name in _choose_files(sizes, group)},
        group,
    )

    def commit() -> None:
        files = known | {name: entry for part in parts or () for name, entry in part.items()}
        manifest = {
            "format": _FORMAT,
            "number": 1 + max(_iterate_neighbour_numbers(path), default=0),
            "written": {"time": time.time(), **versions()},
            "layout": layout,
            "files": {name: files[name] for name in sorted(files)},
        }
        _sync_and_write(path, manifest)

    run_on_first(f"writing {path / MANIFEST}", commit, group)


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a complete checkpoint.

    Raises:
        ValueError: the manifest is missing or damaged.
    """
    path = Path(folder) / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _check_fields(path, content)
    except FileNotFoundError as error:
        raise ValueError(
            f"{Path(folder)} has no {MANIFEST}: this checkpoint was not finished; load an older one"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, AttributeError, TypeError) as e:
        raise ValueError(f"{path} is damaged ({e}); load an older checkpoint") from e
    return dict(content)


def _check_fields(path: Path, content: dict[str, Any]) -> None:
    if content["format"] != _FORMAT:
        raise ValueError(
            f"{path} has format {content['format']}, this version reads {_FORMAT}; load it with "
            f"hf_moe_ep {content['written']['hf_moe_ep']}"
        )
    for entry in content["files"].values():
        if not isinstance(entry["size"], int) or not isinstance(entry["sha256"], str):
            raise TypeError(f"no size or sha256 in {entry}")
    float(content["written"]["time"])
    if not isinstance(content.get("number", 0), int):
        raise TypeError(f"the number is {content['number']!r}")


def check(
    folder: str | os.PathLike[str], *, on_read: Callable[[int], object] | None = None
) -> None:
    """Compare every file of a checkpoint with its manifest; every rank calls this.

    Args:
        on_read: is called with the number of bytes after each read of this rank.

    Raises:
        ValueError: on every rank: a file is missing, changed or of another size (the error names
            the first such file, with the expected and the actual value); or ranks see different
            checkpoints in `folder`.
    """
    path = Path(folder)
    check_is_one_checkpoint(path)

    def check_files() -> None:
        files = read(path)["files"]
        names = _choose_files({name: entry["size"] for name, entry in files.items()}, None)
        _compare_sizes(path, {name: files[name] for name in names})
        for name in names:
            expected, actual = files[name]["sha256"], compute_sha256(path / name, on_read)
            if actual != expected:
                raise ValueError(
                    f"{path / name} has changed since it was written: sha256 {actual}, {MANIFEST} "
                    f"says {expected}; load an older checkpoint"
                )

    run_on_all(f"reading {path}", check_files)


def check_is_one_checkpoint(folder: Path) -> None:
    """Check that all ranks see the same checkpoint in `folder`; every rank calls this.

    The folder of another node, or of a rank with another working directory, may hold a checkpoint
    of another run. The model would then get some shards of each run.

    Raises:
        ValueError: on every rank: ranks see different manifests, or a rank sees none.
    """

    def hash_manifest() -> str:
        read(folder)
        return compute_sha256(folder / MANIFEST)

    own = run_on_all(f"reading {folder}", hash_manifest)
    hashes = find_differing(own) or [own]
    if others := [rank for rank, other in enumerate(hashes) if other != hashes[0]]:
        raise ValueError(
            f"ranks {others} see another checkpoint in {folder} than rank 0, so the run would "
            f"continue with a mixture of both; name one folder that all ranks share, or copy the "
            f"checkpoint to every node"
        )


def check_sizes(folder: str | os.PathLike[str]) -> None:
    """Compare the sizes of all files with the manifest, without reading the files."""
    _compare_sizes(Path(folder), read(folder)["files"])


def find_newest_complete(root: str | os.PathLike[str]) -> Path:
    """Return the newest complete checkpoint in `root`, or `root` itself if it is a checkpoint.

    Only the sizes of files are compared.

    Raises:
        ValueError: there is no complete checkpoint; the message lists the other folders.
    """
    path = Path(root)
    complete, reasons = list_complete(path)
    if not complete:
        kind = "has no folders" if path.is_dir() else "does not exist"
        lines = "\n".join(f"  {reason}" for reason in reasons.values()) or (
            f"  it {'is a file' if path.is_file() else kind}"
        )
        raise ValueError(f"no complete checkpoint in {path}:\n{lines}")
    return complete[-1]


def list_complete(root: Path) -> tuple[list[Path], dict[Path, str]]:
    """List the complete checkpoints in `root`, newest last, and why other folders are incomplete.

    `root` may also be a checkpoint.
    """
    if is_ours(root):
        try:
            check_sizes(root)
        except ValueError as error:
            return [], {root: str(error)}
        return [root], {}
    complete: list[Saved] = []
    reasons: dict[Path, str] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            if not folder.is_dir():
                continue
            check_sizes(folder)
            complete.append(read_saved(folder))
        # OSError: no permission, a dead mount, or a folder that another process has just deleted
        except (ValueError, OSError) as error:
            reasons[folder] = str(error)
    return sort_newest_last(complete), reasons


def check_is_shared(folder: Path) -> None:
    """Check that every rank sees the marker that rank 0 has just written to `folder`.

    Raises:
        ValueError: on every rank, if a rank does not see it. Without this check, ranks of other
            nodes would write their shards to their own disks, and the checkpoint would lack them.
    """

    def read_marker() -> str:
        marker = folder / STARTED
        return marker.read_text(encoding="utf-8") if marker.is_file() else ""

    marker = run_on_all(f"saving {folder}", read_marker)
    # The disk of another node may have a marker of an older save to the same path.
    markers = find_differing(marker) or [marker]
    for rank, seen in enumerate(markers):
        if seen != markers[0]:
            raise ValueError(
                f"rank {rank} does not see {folder / STARTED}, which rank 0 has written: all ranks "
                f"save one checkpoint together, so the folder must be on a disk that all nodes "
                f"share, and save_on_each_node must be False"
            )


def try_to_delete(folder: Path) -> bool:
    """Delete an old checkpoint; warn and return False if it cannot be deleted.

    A folder that cannot be deleted must not end a run. The manifest is deleted first, so that a
    folder that is only partly deleted counts as unfinished.
    """
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"{folder} could not be deleted, and counts as unfinished: {error}", stacklevel=2
        )
        return False
    return True


def read_saved(folder: Path) -> Saved:
    """Read the number and the time of a checkpoint; raise ValueError without a valid manifest."""
    content = read(folder)
    return Saved(folder, content.get("number", 0), content["written"]["time"])


def _iterate_neighbour_numbers(folder: Path) -> Iterator[int]:
    """Yield the numbers of the complete checkpoints in the neighbouring folders."""
    for other in folder.absolute().parent.iterdir():
        try:
            if other.name != folder.name and other.is_dir():
                yield read_saved(other).number
        except (ValueError, OSError):  # not a checkpoint, unfinished, or not readable
            continue


def versions() -> dict[str, str]:
    """Return the versions of the packages that a checkpoint depends on."""
    packages = ("hf_moe_ep", "torch", "transformers")
    return {package: get_installed_version(package) or "from source" for package in packages}


def _list_files_to_hash(
    folder: Path, known: dict[str, dict[str, Any]], belongs: Callable[[str], bool] | None
) -> dict[str, int]:
    """Return the sizes of the files that have no hash yet; check the sizes of `known` files."""
    _compare_sizes(folder, known)
    sizes = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name in known or name in (MANIFEST, PARTIAL) or path.name.startswith(_DELETED_ON_NFS):
            continue
        if path.is_file() and (belongs is None or belongs(name)):
            sizes[name] = path.stat().st_size
    return sizes


def _choose_files(sizes: dict[str, int], group: dist.ProcessGroup | None) -> list[str]:
    """Choose the files that this rank reads; all ranks read about the same number of bytes.

    The largest file is assigned first, and each file to the rank with the fewest bytes so far.
    """
    load, names = [(0, rank) for rank in range(world_size(group))], []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        num_bytes, rank = load[0]
        heapq.heapreplace(load, (num_bytes + sizes[name] + 1, rank))
        if rank == this_rank():
            names.append(name)
    return names


def _sync_and_hash(folder: Path, name: str) -> dict[str, Any]:
    with open(folder / name, "rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return {"size": size, "sha256": compute_sha256(folder / name)}


def _compare_sizes(folder: Path, files: dict[str, Any]) -> None:
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder / name} is missing, but {MANIFEST} says that it has {entry['size']} "
                f"bytes; load an older checkpoint"
            ) from error
        if size != entry["size"]:
            raise ValueError(
                f"{folder / name} has {size} bytes, {MANIFEST} says {entry['size']}; load an older "
                f"checkpoint"
            )


def _sync_and_write(folder: Path, manifest: dict[str, Any]) -> None:
    for parent in {(folder / name).parent for name in manifest["files"]}:
        sync_folder(parent)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
