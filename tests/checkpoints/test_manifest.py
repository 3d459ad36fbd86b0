"""A manifest marks a complete checkpoint, and every rank raises an error that names the damage."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from hf_moe_ep.checkpoints.storage import manifest

FILES = {"a.bin": b"x" * 1000, "deep/b.bin": b"y" * 70, "deep/empty": b"", "c.json": b"{}"}
LAYOUT = {"world_size": 1, "ep_size": 1}


def _write_files(path: Path) -> Path:
    for name, data in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def _write_complete(path: Path, when: float | None = None) -> Path:
    manifest.begin(_write_files(path))
    manifest.write(path, LAYOUT)
    if when is not None:
        content = json.loads((path / manifest.MANIFEST).read_text())
        content["written"]["time"] = when
        (path / manifest.MANIFEST).write_text(json.dumps(content))
    return path


def test_a_manifest_has_the_size_and_hash_of_every_file(tmp_path: Path) -> None:
    folder = _write_complete(tmp_path / "one")
    content = manifest.read(folder)
    expected = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in FILES.items()
    }
    marker = content["files"].pop(manifest.STARTED)
    assert marker["size"] == (folder / manifest.STARTED).stat().st_size
    assert content["files"] == expected and content["layout"] == LAYOUT and content["number"] == 1
    assert set(content["written"]) == {"time", "hf_moe_ep", "torch", "transformers"}
    manifest.check(folder)
    assert not (folder / manifest.PARTIAL).exists()


def test_a_file_that_its_writer_hashed_is_not_read(tmp_path: Path) -> None:
    """The manifest has the hash of the writer. `write` raises if the size of the file changed."""
    hashed = {"a.bin": {"size": 1000, "sha256": "of its writer"}}
    manifest.begin(_write_files(tmp_path))
    with mock.patch.object(manifest, "compute_sha256", wraps=manifest.compute_sha256) as read:
        manifest.write(tmp_path, LAYOUT, written=hashed)
    names = sorted(call.args[0].name for call in read.mock_calls)
    assert names == ["b.bin", "c.json", "empty", manifest.STARTED]
    files = manifest.read(tmp_path)["files"]
    assert files["a.bin"] == hashed["a.bin"] and files.keys() == {*FILES, manifest.STARTED}
    manifest.begin(tmp_path)
    os.truncate(tmp_path / "a.bin", 999)
    with pytest.raises(ValueError, match=r"a\.bin has 999 bytes, manifest\.json says 1000"):
        manifest.write(tmp_path, LAYOUT, written=hashed)
    assert not (tmp_path / manifest.MANIFEST).exists()


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (lambda f: os.truncate(f / "a.bin", 999), r"a\.bin has 999 bytes.*says 1000"),
    "missing": (lambda f: (f / "deep/b.bin").unlink(), r"deep/b\.bin is missing.*has 70 bytes"),
    "flipped": (lambda f: _flip_bit(f / "a.bin"), r"a\.bin has changed.*sha256 [0-9a-f]{64}.*says"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"was not finished"),
    "half a manifest": (
        lambda f: os.truncate(f / "manifest.json", 40),
        r"manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    damage_folder, message = DAMAGE[damage]
    old, new = _write_complete(tmp_path / "old", 1.0), _write_complete(tmp_path / "new", 2.0)
    assert manifest.find_newest_complete(tmp_path) == new
    damage_folder(new)
    with pytest.raises(ValueError, match=message):
        manifest.check(new)
    # find_newest_complete compares sizes only, so it does not notice the flipped bit.
    assert manifest.find_newest_complete(tmp_path) == (new if damage == "flipped" else old)


def test_the_newest_is_the_last_written_and_errors_list_the_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*\n  it does not exist"):
        manifest.find_newest_complete(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="it has no folders"):
        manifest.find_newest_complete(tmp_path)
    manifest.begin(_write_files(tmp_path / "torn"))
    with pytest.raises(ValueError, match=r"torn has no manifest.json: this checkpoint was not fin"):
        manifest.find_newest_complete(tmp_path)
    with pytest.raises(ValueError, match=r"torn has no manifest.json"):
        manifest.find_newest_complete(tmp_path / "torn")
    _write_complete(tmp_path / "z", 2.0)
    last = _write_complete(tmp_path / "a", 1.0)
    assert manifest.find_newest_complete(tmp_path) == last
    assert manifest.find_newest_complete(last) == last
    manifest.begin(last)
    assert manifest.find_newest_complete(tmp_path) == tmp_path / "z"


def test_folders_of_other_programs_are_skipped(tmp_path: Path) -> None:
    """A folder may be unreadable (lost+found), or have a manifest.json of another program."""
    ours, locked = _write_complete(tmp_path / "one"), tmp_path / "lost+found"
    texts = {"a": "[]", "b": '{"format": 1, "files": [], "written": {}}', "c": "3"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.MANIFEST).write_text(text)
    locked.mkdir()
    stock_read_text = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parent == locked:  # mocked, because root may read every file
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stock_read_text(path, *args, **kwargs)

    with mock.patch.object(Path, "read_text", read_text):
        assert manifest.find_newest_complete(tmp_path) == ours


def test_files_that_disappear_end_neither_a_save_nor_the_search(tmp_path: Path) -> None:
    """NFS removes a deleted file when it is closed; another process may delete a checkpoint."""
    first, second = _write_complete(tmp_path / "one", 1), _write_complete(tmp_path / "two", 2)
    (first / ".nfs0001").touch()
    stock_stat, stock_read = Path.stat, manifest.read_saved

    def stat(path: Path, **kwargs: Any) -> os.stat_result:
        if path.name == ".nfs0001":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return stock_stat(path, **kwargs)

    def read_saved(folder: Path) -> Any:
        if folder == second:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        return stock_read(folder)

    with (
        mock.patch.object(Path, "stat", stat),
        mock.patch.object(Path, "is_file", lambda path: os.path.isfile(path)),
    ):
        manifest.write(first, LAYOUT)
    with mock.patch.object(manifest, "read_saved", read_saved):
        assert manifest.find_newest_complete(tmp_path) == first


def _write_and_check(rank: int, world: int, folder: str) -> dict[str, Any]:
    path, hashed = Path(folder), []
    stock_hash = manifest.compute_sha256

    def count(file: Path) -> str:
        hashed.append(file.name)
        return stock_hash(file)

    def fail(file: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    results: dict[str, Any] = {}
    with mock.patch.object(manifest, "compute_sha256", fail if rank == 2 else count):
        with pytest.raises(RuntimeError) as caught:
            manifest.write(path, LAYOUT)
    results["failed"] = str(caught.value)
    assert not (path / manifest.MANIFEST).exists()
    hashed.clear()
    with mock.patch.object(manifest, "compute_sha256", count):
        manifest.write(path, LAYOUT)
    results["hashed"] = list(hashed)
    manifest.check(path)
    dist.barrier()
    if rank == 0:
        _flip_bit(path / "a.bin")
    dist.barrier()
    with pytest.raises(ValueError) as flipped:
        manifest.check(path)
    results["flipped"] = str(flipped.value)
    return results


def test_ranks_share_the_hashing_and_every_error(tmp_path: Path) -> None:
    ranks = run_ranks(_write_and_check, 3, str(_write_files(tmp_path / "one")))
    assert sorted(name for result in ranks for name in result["hashed"]) == sorted(
        Path(name).name for name in FILES
    )
    assert [len(result["hashed"]) > 0 for result in ranks] == [True] * 3
    for result in ranks:
        assert "failed on rank 2: OSError: [Errno 28] No space left" in result["failed"]
        assert result["flipped"] == ranks[0]["flipped"]
        assert "a.bin has changed" in result["flipped"]
