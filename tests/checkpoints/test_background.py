"""Test saves in the background: a destroyed group, an error without wait(), another directory."""

import logging
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.jobs.resume import Layout, start, step
from support.ranks import run_ranks

from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import folder as training_folder
from hf_moe_ep.checkpoints.training.save import save_checkpoint

ONE = Layout("unsharded", 1)
TWO = Layout("two", 2, {"ep_size": 2})


def _save_and_destroy(rank: int, world: int, folder: str, when: str) -> str:
    run, destroyed, write = start("full", TWO), threading.Event(), getattr(training_folder, when)
    step(run, 0)

    def write_late(*args: Any, **kwargs: Any) -> Any:
        assert destroyed.wait(30)
        return write(*args, **kwargs)

    with mock.patch.object(training_folder, when, write_late):
        handle = save_checkpoint(folder, run.model, run.optimizer, asynchronous=True)
        dist.destroy_process_group()
        destroyed.set()
        with pytest.raises(RuntimeError) as caught:
            handle.wait()
    store = dist.HashStore()  # run_ranks needs a group to destroy
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return str(caught.value)


@pytest.mark.parametrize("when", ["write_tensors", "write_json"])
def test_a_save_after_its_group_is_destroyed_writes_no_manifest(tmp_path: Path, when: str) -> None:
    """Without a process group every rank would act as rank 0 and write a manifest."""
    folder = tmp_path / "one"
    for message in run_ranks(_save_and_destroy, 2, str(folder), when):
        assert "before destroy_process_group(), call wait() of the handle that" in message
    assert not (folder / manifest.MANIFEST).exists()


def test_an_error_is_logged_without_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start("full", ONE)
    full = mock.patch.object(training_folder, "write_json", side_effect=OSError(28, "disk full"))
    with full, caplog.at_level(logging.ERROR, "hf_moe_ep"):
        handle = save_checkpoint(tmp_path / "one", run.model, run.optimizer, asynchronous=True)
        assert handle._thread is not None
        handle._thread.join()
    (message,) = caplog.messages
    assert "one was not saved: " in message and "rank 0: OSError: [Errno 28] disk full" in message


def test_a_relative_path_stays_valid_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, may_write, write = start("full", ONE), threading.Event(), training_folder.write_tensors

    def write_late(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(training_folder, "write_tensors", write_late):
        handle = save_checkpoint("x", run.model, run.optimizer, asynchronous=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        may_write.set()
        handle.wait()
    manifest.check(tmp_path / "x")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_two_models_in_one_directory_are_refused(tmp_path: Path) -> None:
    """The second save must not delete the files of the first as if that save were unfinished."""
    first, second, may_write = start("full", ONE), start("full", ONE, seed=1), threading.Event()
    write = training_folder.write_tensors

    def write_late(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    with mock.patch.object(training_folder, "write_tensors", write_late):
        handle = save_checkpoint(tmp_path / "x", first.model, first.optimizer, asynchronous=True)
        with pytest.raises(ValueError, match=r"another model is being saved to .*x; save each"):
            save_checkpoint(f"{tmp_path}/x", second.model, second.optimizer)
        may_write.set()
        handle.wait()
    manifest.check(tmp_path / "x")
