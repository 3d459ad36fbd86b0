"""The kernel copies tensors of other files byte for byte, and a run hashes them once."""

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.extra_files import INDEX, assert_same_bytes, read_files, write_with_extra
from transformers import AutoModelForCausalLM

from hf_moe_ep import patch
from hf_moe_ep.checkpoints.storage import safetensors_file
from hf_moe_ep.checkpoints.storage.safetensors_file import (
    Writer,
    hash_tensor,
    read_header,
    sha256_of_tensors,
)
from hf_moe_ep.checkpoints.verify import verify

# Tensors without a byte, below a block, of several blocks, and with a rest of a block.
TENSORS = {
    "a": torch.arange(7, dtype=torch.int8),
    "b": torch.randn(300, 999).bfloat16(),
    "c": torch.zeros(0, 3),
    "d": torch.tensor(3.0),
    "e": torch.randn(2**17),
}


def _copy_all(folder: Path) -> tuple[Path, Writer]:
    source = folder / "source.safetensors"
    save_file(TENSORS, source)
    found, _ = read_header(source)
    order = ["e", "a", "d", "c", "b"]
    header = [(key, found[key].shape, found[key].dtype) for key in order]
    with Writer(folder / "copy.safetensors", header) as writer:
        for key in order:
            writer.copy(key, found[key])
    return folder / "copy.safetensors", writer


def _raise_cross_device(*arguments: Any) -> int:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def _copy_no_bytes(*arguments: Any) -> int:
    return 0


def _copy_some_bytes(source: int, target: int, count: int, start: int, position: int) -> int:
    """Copy fewer bytes than asked for, and raise an error at some positions."""
    if start % 3 == 1:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")
    data = os.pread(source, min(count, 1001), start)
    return os.pwrite(target, data, position)


@pytest.mark.parametrize("kernel", [None, _raise_cross_device, _copy_no_bytes, _copy_some_bytes])
def test_every_byte_is_copied(kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel is not None:
        monkeypatch.setattr(os, "copy_file_range", kernel)
    path, writer = _copy_all(tmp_path)
    assert_same_bytes(load_file(path), TENSORS)
    for key, tensor in TENSORS.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert writer.copied_hashes[key] == hashlib.sha256(data).digest()
    assert writer.sha256_of_tensors == sha256_of_tensors(path)


def test_a_file_may_have_copied_and_written_tensors(tmp_path: Path) -> None:
    """merge-adapter writes such files, because it keeps the division of the base into files."""
    source, path = tmp_path / "source.safetensors", tmp_path / "mixed.safetensors"
    save_file(TENSORS, source)
    found, _ = read_header(source)
    for order in (["b", "e", "a"], ["e", "b", "a"], ["b", "a", "e"]):
        header = [(key, found[key].shape, found[key].dtype) for key in order]
        with Writer(path, header) as writer:
            for key in order:
                shape = found[key].shape
                if key == "e":
                    writer.copy(key, found[key])
                else:
                    writer.write(key, shape, tuple((0, n) for n in shape), TENSORS[key])
        assert not writer.has_only_copies
        assert writer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert_same_bytes(load_file(path), {key: TENSORS[key] for key in order})


def test_a_source_that_ends_too_early_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.safetensors"
    save_file(TENSORS, source)
    found, _ = read_header(source)
    os.truncate(source, found["e"].start + 9)
    writer = Writer(tmp_path / "copy", [("e", found["e"].shape, found["e"].dtype)])
    with pytest.raises(ValueError, match=f"{source} ends at byte {found['e'].start + 9}; it was"):
        with writer:
            writer.copy("e", found["e"])
    with pytest.raises(ValueError, match=f"{source} ends at byte {found['e'].start + 9}; it was"):
        hash_tensor(found["e"])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_strided_slice_is_written(rows: int, tmp_path: Path) -> None:
    """torch calls a slice of one element contiguous, whatever its stride."""
    column = torch.arange(2.0 * rows).view(rows, 2)[:, 1]
    with Writer(tmp_path / "file", [("x", (rows,), torch.float32)]) as writer:
        writer.write("x", (rows,), ((0, rows),), column)
    assert torch.equal(load_file(tmp_path / "file")["x"], column)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", raise_full)
    with pytest.raises(OSError, match=r"No space left on device: .*copy.safetensors"):
        _copy_all(tmp_path)


def test_an_error_of_the_disk_in_another_thread_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed write only once, to the first sync after it."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(safetensors_file, "_BYTES_PER_SYNC", 600_000)  # after the last tensor
    with pytest.raises(OSError, match="Input/output error"):
        _copy_all(tmp_path)


def test_a_sync_does_not_wait_for_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk works while hashes of earlier tensors are queued."""
    synced = threading.Event()

    def hash_after_the_sync(tensor: Any) -> bytes:
        assert synced.wait(10), "the sync waits for the hashes"
        return hash_tensor(tensor)

    monkeypatch.setattr(safetensors_file, "hash_tensor", hash_after_the_sync)
    monkeypatch.setattr(safetensors_file, "_BYTES_PER_SYNC", 600_000)  # after the last tensor
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.set())
    path, _ = _copy_all(tmp_path)
    assert_same_bytes(load_file(path), TENSORS)


def test_the_second_save_does_not_hash_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later saves use the hashes of the first save, and `verify` compares them."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    hashed: list[str] = []

    def count(tensor: Any) -> bytes:
        hashed.append(tensor.file.name)
        return hash_tensor(tensor)

    monkeypatch.setattr(safetensors_file, "hash_tensor", count)
    model.save_pretrained(tmp_path / "first")
    assert len(hashed) == len(extra)
    model.save_pretrained(tmp_path / "second")
    assert len(hashed) == len(extra)
    for name in ("first", "second"):
        assert_same_bytes(read_files(tmp_path / name), read_files(tmp_path / "base"))
        metadata = json.loads((tmp_path / name / INDEX).read_text())["metadata"]
        copied, others = metadata["hf_moe_ep_sha256_of_tensors"], metadata["hf_moe_ep_sha256"]
        assert not copied.keys() & others.keys()
        assert verify(tmp_path / name).facts["hashes"].startswith(f"{len(copied | others)} files")
    (file,) = copied
    content = (tmp_path / "second" / file).read_bytes()
    (tmp_path / "second" / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{file} has changed since it was written: sha256"):
        verify(tmp_path / "second")
