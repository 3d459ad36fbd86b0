"""A save over another checkpoint, killed in front of every step of its commit."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_files import assert_equal, hub_state, read_all
from support.tiny_models import tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_moe_ep import patch, save_pretrained
from hf_moe_ep.checkpoints.hub import switch, write
from hf_moe_ep.checkpoints.hub.switch import switch_files

STEPS = ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")


def _other(**changes: Any) -> nn.Module:
    """A model with other values; another size of the vocabulary does not fit the old config."""
    model = tiny(dtype=torch.float32, seed=1)
    if changes:
        model.resize_token_embeddings(101, mean_resizing=False)
    return model


def _by_us(folder: Path) -> None:
    save_pretrained(patch(tiny(dtype=torch.float32)), folder)


def _by_stock(folder: Path) -> None:
    tiny(dtype=torch.float32).save_pretrained(folder)


def _by_stock_over_ours(folder: Path) -> None:
    """Let stock write a model.safetensors, which makes the index invalid."""
    _by_us(folder)
    _by_stock(folder)


def _killed_at(step: int, save: Callable[[], None]) -> bool:
    """Run `save` in a fork that is killed in front of a step; False: it has not so many."""
    if (child := os.fork()) == 0:
        left = step

        def stopping(stock: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return stock(*args, **kwargs)

            return call

        for name in STEPS:
            setattr(os, name, stopping(getattr(os, name)))
        try:
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def _loaded(folder: Path) -> dict[str, Tensor]:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    return {**hub_state(loaded), "vocabulary": torch.tensor(loaded.config.vocab_size)}


@pytest.mark.parametrize(
    ("before", "resized"),
    [
        (_by_us, True),
        (_by_stock, False),
        pytest.param(_by_us, False, marks=pytest.mark.slow),
        pytest.param(_by_stock, True, marks=pytest.mark.slow),
        pytest.param(_by_stock_over_ours, False, marks=pytest.mark.slow),
        pytest.param(_by_stock_over_ours, True, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_step_leaves_one_whole_checkpoint(
    before: Callable[[Path], None], resized: bool, tmp_path: Path
) -> None:
    """Stock transformers reads it and ignores files of the unfinished save."""
    model = patch(_other(resized=True) if resized else _other())
    before(tmp_path / "old")
    (tmp_path / "old" / "notes.txt").write_text("of the user")
    save_pretrained(model, tmp_path / "new")
    old, new = _loaded(tmp_path / "old"), _loaded(tmp_path / "new")
    seen, step = [], 0
    while True:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "old", folder)
        killed = _killed_at(step, lambda folder=folder: save_pretrained(model, folder))  # type: ignore[misc]
        found = _loaded(folder)
        is_new = found["model.norm.weight"].equal(new["model.norm.weight"]) and (
            found["lm_head.weight"].equal(new["lm_head.weight"])
        )
        assert_equal(found, new if is_new else old)
        seen.append(is_new)
        save_pretrained(model, folder)  # the next save of the run that goes on
        assert_equal(_loaded(folder), new)
        names = {path.name for path in folder.iterdir()}
        assert not any(path.is_symlink() for path in folder.rglob("*"))
        kept = {"config.json", "generation_config.json", "notes.txt", write.INDEX}
        assert {name for name in names if not name.startswith("model-")} == kept
        shutil.rmtree(folder)
        if not killed:
            break
        step += 1
    assert seen == sorted(seen), "there is one moment of the commit"
    assert not seen[0] and seen[-1]


def test_without_links_a_save_goes_on_and_says_what_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    _by_stock(tmp_path)
    model = patch(_other(resized=True))
    monkeypatch.setattr(os, "symlink", none)
    save_pretrained(model, tmp_path)
    assert "is on a file system without links" in caplog.text
    assert_equal(read_all(tmp_path), hub_state(model))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_failure_in_front_of_the_commit_restores_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_us(tmp_path)
    old, before = _loaded(tmp_path), sorted(os.listdir(tmp_path))
    stock, calls = switch._set_link, []

    def full(beside: Path, target: str, place: Path) -> None:
        calls.append(place)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        stock(beside, target, place)

    monkeypatch.setattr(switch, "_set_link", full)
    with pytest.raises(RuntimeError, match="No space left on device"):
        save_pretrained(patch(_other(resized=True)), tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    assert_equal(_loaded(tmp_path), old)


def test_files_in_folders_and_links_of_the_user_are_switched(tmp_path: Path) -> None:
    """For example additional_chat_templates, and the links of the hub's cache."""
    folder, staged, blob = tmp_path / "model", tmp_path / "model" / ".staged", tmp_path / "blob"
    (staged / "templates").mkdir(parents=True)
    blob.write_text("old")
    (folder / "config.json").symlink_to(blob)
    (folder / "weights").write_text("old")
    (staged / "config.json").write_text("new")
    (staged / "templates" / "tool.jinja").write_text("new")
    assert switch_files(folder, staged, ["weights", "not there"])
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if not p.is_dir()}
    assert {name: path.read_text() for name, path in files.items()} == {
        "config.json": "new",
        "templates/tool.jinja": "new",
    }
    assert blob.read_text() == "old" and not (folder / "config.json").is_symlink()
