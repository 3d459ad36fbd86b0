"""A kill before any file operation of a save leaves one complete checkpoint, the old or the new.

claims/test_kills.py lists the tests of kills in other saves.
"""

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
from hf_moe_ep.checkpoints.hub import write
from hf_moe_ep.checkpoints.storage import switch
from hf_moe_ep.checkpoints.storage.switch import switch_files

STEPS = ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")


def _build_changed_model(resized: bool) -> nn.Module:
    """Build a model with other values. A resized vocabulary does not fit the old config."""
    model = tiny(dtype=torch.float32, seed=1)
    if resized:
        model.resize_token_embeddings(101, mean_resizing=False)
    return model


def _save_by_us(folder: Path) -> None:
    save_pretrained(patch(tiny(dtype=torch.float32)), folder)


def _save_by_stock(folder: Path) -> None:
    tiny(dtype=torch.float32).save_pretrained(folder)


def _save_by_stock_over_ours(folder: Path) -> None:
    """Let stock write a model.safetensors, which makes the index invalid."""
    _save_by_us(folder)
    _save_by_stock(folder)


def _kill_at(step: int, save: Callable[[], None]) -> bool:
    """Run `save` in a fork that is killed before operation `step`; False if `save` ends first."""
    if (child := os.fork()) == 0:
        remaining = step

        def kill_before(stock: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal remaining
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                remaining -= 1
                return stock(*args, **kwargs)

            return call

        for name in STEPS:
            setattr(os, name, kill_before(getattr(os, name)))
        try:
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def _load_state(folder: Path) -> dict[str, Tensor]:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    return {**hub_state(loaded), "vocabulary": torch.tensor(loaded.config.vocab_size)}


@pytest.mark.parametrize(
    ("before", "resized"),
    [
        pytest.param(_save_by_us, True, marks=pytest.mark.slow),
        pytest.param(_save_by_stock, False, marks=pytest.mark.slow),
        pytest.param(_save_by_us, False, marks=pytest.mark.slow),
        pytest.param(_save_by_stock, True, marks=pytest.mark.slow),
        pytest.param(_save_by_stock_over_ours, False, marks=pytest.mark.slow),
        pytest.param(_save_by_stock_over_ours, True, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_step_leaves_one_whole_checkpoint(
    before: Callable[[Path], None], resized: bool, tmp_path: Path
) -> None:
    """Stock transformers loads the old or the new model, and ignores an unfinished save."""
    model = patch(_build_changed_model(resized))
    before(tmp_path / "old")
    (tmp_path / "old" / "notes.txt").write_text("of the user")
    save_pretrained(model, tmp_path / "new")
    old, new = _load_state(tmp_path / "old"), _load_state(tmp_path / "new")
    new_by_step, step = [], 0
    while True:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "old", folder)
        killed = _kill_at(step, lambda folder=folder: save_pretrained(model, folder))  # type: ignore[misc]
        loaded = _load_state(folder)
        is_new = loaded["model.norm.weight"].equal(new["model.norm.weight"]) and (
            loaded["lm_head.weight"].equal(new["lm_head.weight"])
        )
        assert_equal(loaded, new if is_new else old)
        new_by_step.append(is_new)
        save_pretrained(model, folder)  # the next save of the resumed run
        assert_equal(_load_state(folder), new)
        names = {path.name for path in folder.iterdir()}
        assert not any(path.is_symlink() for path in folder.rglob("*"))
        other_files = {"config.json", "generation_config.json", "notes.txt", write.INDEX}
        assert {name for name in names if not name.startswith("model-")} == other_files
        shutil.rmtree(folder)
        if not killed:
            break
        step += 1
    assert new_by_step == sorted(new_by_step), "one operation is the commit"
    assert not new_by_step[0] and new_by_step[-1]


def test_a_file_system_without_links_is_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    _save_by_stock(tmp_path)
    model = patch(_build_changed_model(resized=True))
    monkeypatch.setattr(os, "symlink", refuse)
    save_pretrained(model, tmp_path)
    assert "is on a file system without links" in caplog.text
    assert_equal(read_all(tmp_path), hub_state(model))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_error_before_the_commit_restores_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_by_us(tmp_path)
    old, before = _load_state(tmp_path), sorted(os.listdir(tmp_path))
    stock_set_link, linked_paths = switch._set_link, []

    def fail_at_second_link(switch_folder: Path, target: str, path: Path) -> None:
        linked_paths.append(path)
        if len(linked_paths) == 2:
            raise OSError(28, "No space left on device")
        stock_set_link(switch_folder, target, path)

    monkeypatch.setattr(switch, "_set_link", fail_at_second_link)
    with pytest.raises(RuntimeError, match="No space left on device"):
        save_pretrained(patch(_build_changed_model(resized=True)), tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    assert_equal(_load_state(tmp_path), old)


def test_files_in_folders_and_links_are_switched(tmp_path: Path) -> None:
    """Folders (additional_chat_templates) are moved, and links (the hub's cache) are replaced."""
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
