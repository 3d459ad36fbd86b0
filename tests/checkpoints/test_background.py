"""Saves in the background whose process group is destroyed, or for whose error nobody waits."""

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


def _destroyed(rank: int, world: int, folder: str, when: str) -> str:
    run, gone, stock = start("full", TWO), threading.Event(), getattr(training_folder, when)
    step(run, 0)

    def late(*args: Any, **kwargs: Any) -> Any:
        assert gone.wait(30)
        return stock(*args, **kwargs)

    with mock.patch.object(training_folder, when, late):
        handle = save_checkpoint(folder, run.model, run.optimizer, asynchronous=True)
        dist.destroy_process_group()
        gone.set()
        with pytest.raises(RuntimeError) as caught:
            handle.wait()
    store = dist.HashStore()  # run_ranks destroys a group in the end
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return str(caught.value)


@pytest.mark.parametrize("when", ["write_tensors", "write_json"])
def test_a_destroyed_group_commits_nothing(tmp_path: Path, when: str) -> None:
    """Without a group every rank would be rank 0 and write its own manifest."""
    folder = tmp_path / "one"
    for said in run_ranks(_destroyed, 2, str(folder), when):
        assert "call wait() of the handle that save_checkpoint returned before destroy" in said
    assert not (folder / manifest.MANIFEST).exists()


def test_an_error_is_logged_though_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start("full", ONE)
    full = mock.patch.object(training_folder, "write_json", side_effect=OSError(28, "disk full"))
    with full, caplog.at_level(logging.ERROR, "hf_moe_ep"):
        handle = save_checkpoint(tmp_path / "one", run.model, run.optimizer, asynchronous=True)
        assert handle._thread is not None
        handle._thread.join()
    (said,) = caplog.messages
    assert "one was not saved: " in said and "rank 0: OSError: [Errno 28] disk full" in said


def test_a_change_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, write, stock = start("full", ONE), threading.Event(), training_folder.write_tensors

    def late(*args: Any) -> None:
        assert write.wait(30)
        stock(*args)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(training_folder, "write_tensors", late):
        handle = save_checkpoint("x", run.model, run.optimizer, asynchronous=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        write.set()
        handle.wait()
    manifest.check(tmp_path / "x")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_two_models_to_one_directory(tmp_path: Path) -> None:
    """The second save must not remove files of the first one as leftovers of an unfinished save."""
    one, two, write = start("full", ONE), start("full", ONE, seed=1), threading.Event()
    stock = training_folder.write_tensors

    def late(*args: Any) -> None:
        assert write.wait(30)
        stock(*args)

    with mock.patch.object(training_folder, "write_tensors", late):
        handle = save_checkpoint(tmp_path / "x", one.model, one.optimizer, asynchronous=True)
        with pytest.raises(ValueError, match=r"another model is being saved to .*x; save each"):
            save_checkpoint(f"{tmp_path}/x", two.model, two.optimizer)
        write.set()
        handle.wait()
    manifest.check(tmp_path / "x")
