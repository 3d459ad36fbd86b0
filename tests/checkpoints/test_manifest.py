"""Complete or not there: every damage is named, every rank hears of it, each file is read once."""

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


def _folder(path: Path) -> Path:
    for name, data in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def _complete(path: Path, when: float | None = None) -> Path:
    manifest.begin(_folder(path))
    manifest.write(path, LAYOUT)
    if when is not None:
        found = json.loads((path / manifest.MANIFEST).read_text())
        found["written"]["time"] = when
        (path / manifest.MANIFEST).write_text(json.dumps(found))
    return path


def test_it_names_every_file_with_size_and_hash(tmp_path: Path) -> None:
    folder = _complete(tmp_path / "one")
    found = manifest.read(folder)
    wanted = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in FILES.items()
    }
    marker = found["files"].pop(manifest.STARTED)
    assert marker["size"] == (folder / manifest.STARTED).stat().st_size
    assert found["files"] == wanted and found["layout"] == LAYOUT and found["number"] == 1
    assert set(found["written"]) == {"time", "hf_moe_ep", "torch", "transformers"}
    manifest.check(folder)
    assert not (folder / manifest.PARTIAL).exists()


def test_what_its_writer_has_hashed_is_not_read_again(tmp_path: Path) -> None:
    """The manifest takes the hash of the writer, except where the file has another size by now."""
    told = {"a.bin": {"size": 1000, "sha256": "of its writer"}}
    manifest.begin(_folder(tmp_path))
    with mock.patch.object(manifest, "sha256_of", wraps=manifest.sha256_of) as read:
        manifest.write(tmp_path, LAYOUT, written=told)
    names = sorted(call.args[0].name for call in read.mock_calls)
    assert names == ["b.bin", "c.json", "empty", manifest.STARTED]
    found = manifest.read(tmp_path)["files"]
    assert found["a.bin"] == told["a.bin"] and found.keys() == {*FILES, manifest.STARTED}
    manifest.begin(tmp_path)
    os.truncate(tmp_path / "a.bin", 999)
    with pytest.raises(ValueError, match=r"a\.bin has 999 bytes, manifest\.json says 1000"):
        manifest.write(tmp_path, LAYOUT, written=told)
    assert not (tmp_path / manifest.MANIFEST).exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (lambda f: os.truncate(f / "a.bin", 999), r"a\.bin has 999 bytes.*says 1000"),
    "missing": (
        lambda f: (f / "deep/b.bin").unlink(),
        r"deep/b\.bin is missing.*has 70 bytes",
    ),
    "flipped": (lambda f: _flip(f / "a.bin"), r"a\.bin has changed.*sha256 [0-9a-f]{64}.*says"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"was not finished"),
    "half a manifest": (
        lambda f: os.truncate(f / "manifest.json", 40),
        r"manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    do, message = DAMAGE[damage]
    old, new = _complete(tmp_path / "old", 1.0), _complete(tmp_path / "new", 2.0)
    assert manifest.newest_complete(tmp_path) == new
    do(new)
    with pytest.raises(ValueError, match=message):
        manifest.check(new)
    # Sizes alone show all but a flipped bit.
    assert manifest.newest_complete(tmp_path) == (new if damage == "flipped" else old)


def test_newest_is_the_last_written_and_none_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*\n  it does not exist"):
        manifest.newest_complete(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="it has no folders"):
        manifest.newest_complete(tmp_path)
    manifest.begin(_folder(tmp_path / "torn"))
    with pytest.raises(ValueError, match=r"torn has no manifest.json: this checkpoint was not fin"):
        manifest.newest_complete(tmp_path)
    with pytest.raises(ValueError, match=r"torn has no manifest.json"):
        manifest.newest_complete(tmp_path / "torn")
    _complete(tmp_path / "z", 2.0)
    late = _complete(tmp_path / "a", 1.0)
    assert manifest.newest_complete(tmp_path) == late
    assert manifest.newest_complete(late) == late
    manifest.begin(late)
    assert manifest.newest_complete(tmp_path) == tmp_path / "z"


def test_folders_of_others_are_passed_over(tmp_path: Path) -> None:
    """One folder cannot be read (a volume's lost+found), and one has a manifest of another kind."""
    mine, locked = _complete(tmp_path / "one"), tmp_path / "lost+found"
    texts = {"a": "[]", "b": '{"format": 1, "files": [], "written": {}}', "c": "3"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.MANIFEST).write_text(text)
    locked.mkdir()
    stock = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parent == locked:  # tests may run as root, who may read everything
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stock(path, *args, **kwargs)

    with mock.patch.object(Path, "read_text", read_text):
        assert manifest.newest_complete(tmp_path) == mine


def _ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    path, hashed = Path(folder), []
    stock = manifest.sha256_of

    def counted(file: Path) -> str:
        hashed.append(file.name)
        return stock(file)

    def full(file: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    found: dict[str, Any] = {}
    with mock.patch.object(manifest, "sha256_of", full if rank == 2 else counted):
        with pytest.raises(RuntimeError) as caught:
            manifest.write(path, LAYOUT)
    found["failed"] = str(caught.value)
    assert not (path / manifest.MANIFEST).exists()
    hashed.clear()
    with mock.patch.object(manifest, "sha256_of", counted):
        manifest.write(path, LAYOUT)
    found["hashed"] = list(hashed)
    manifest.check(path)
    dist.barrier()
    if rank == 0:
        _flip(path / "a.bin")
    dist.barrier()
    with pytest.raises(ValueError) as flipped:
        manifest.check(path)
    found["flipped"] = str(flipped.value)
    return found


def test_ranks_share_the_work_and_every_error(tmp_path: Path) -> None:
    ranks = run_ranks(_ranks, 3, str(_folder(tmp_path / "one")))
    assert sorted(name for found in ranks for name in found["hashed"]) == sorted(
        Path(name).name for name in FILES
    )
    assert [len(found["hashed"]) > 0 for found in ranks] == [True] * 3
    for found in ranks:
        assert "failed on rank 2: OSError: [Errno 28] No space left" in found["failed"]
        assert found["flipped"] == ranks[0]["flipped"] and "a.bin has changed" in found["flipped"]
