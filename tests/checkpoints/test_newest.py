"""`newest_checkpoint` returns the last complete checkpoint of a folder, or None."""

import json
import re
import warnings
from pathlib import Path

import pytest
from support.ranks import run_ranks

from hf_moe_ep import newest_checkpoint
from hf_moe_ep.checkpoints.newest import find_newest_resumable
from hf_moe_ep.checkpoints.storage import manifest


def _write_complete(path: Path, when: float) -> Path:
    manifest.begin(path)
    (path / "weights").write_bytes(b"x" * 100)
    manifest.write(path, {"world_size": 1})
    content = json.loads((path / manifest.MANIFEST).read_text())
    content["written"]["time"] = when
    (path / manifest.MANIFEST).write_text(json.dumps(content))
    return path


def test_a_folder_without_checkpoints_gives_none_without_a_warning(tmp_path: Path) -> None:
    """The folder does not exist, is empty, or has only files that are not checkpoints."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").write_text("checkpoint-7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_checkpoint(tmp_path / "nowhere") is None
        assert newest_checkpoint(tmp_path / "runs") is None
        assert newest_checkpoint(tmp_path) is None


def test_a_file_is_refused(tmp_path: Path) -> None:
    """Otherwise a run that should resume would begin anew."""
    (tmp_path / "notes.txt").write_text("checkpoint-7")
    with pytest.raises(ValueError, match=r"notes\.txt is a file; name the folder that holds"):
        newest_checkpoint(tmp_path / "notes.txt")


NOW = 1.8e9
HOUR = 3600.0


def test_the_highest_step_is_the_newest(tmp_path: Path) -> None:
    """The clock of the machine that wrote the last checkpoint is one hour slow."""
    older = _write_complete(tmp_path / "step-90", NOW)
    newer = _write_complete(tmp_path / "step-100", NOW - HOUR)
    assert newest_checkpoint(str(tmp_path)) == newer == manifest.find_newest_complete(tmp_path)
    (newer / "weights").write_bytes(b"x" * 99)
    with pytest.warns(UserWarning, match=r"resuming from .*step-90; skipped: .*99 bytes"):
        assert newest_checkpoint(tmp_path) == older


def test_without_steps_the_last_written_is_the_newest(tmp_path: Path) -> None:
    """Manifests count the writes. A series step-N is compared by the number of its highest step."""
    _write_complete(tmp_path / "step-200", NOW)
    best = _write_complete(tmp_path / "best", NOW - HOUR)
    assert newest_checkpoint(tmp_path) == best
    _write_complete(tmp_path / "step-100", NOW - 3 * HOUR)
    assert newest_checkpoint(tmp_path) == best
    last = _write_complete(tmp_path / "step-300", NOW - 2 * HOUR)
    assert newest_checkpoint(tmp_path) == last
    numbers = {path.name: manifest.read(path)["number"] for path in tmp_path.iterdir()}
    assert numbers == {"step-200": 1, "best": 2, "step-100": 3, "step-300": 4}


def test_manifests_without_a_number_are_read(tmp_path: Path) -> None:
    """Older versions wrote no number. Their checkpoints count as older, by step or else by time."""
    for name, when in (("b", NOW), ("a", NOW + 1), ("step-9", NOW - 1), ("step-10", NOW - 2)):
        path = _write_complete(tmp_path / name, when)
        content = json.loads((path / manifest.MANIFEST).read_text())
        del content["number"]
        (path / manifest.MANIFEST).write_text(json.dumps(content))
    complete, _ = manifest.list_complete(tmp_path)
    assert [path.name for path in complete] == ["step-9", "step-10", "b", "a"]
    newer = _write_complete(tmp_path / "c", NOW - HOUR)
    assert newest_checkpoint(tmp_path) == newer


def test_checkpoints_of_accelerate_are_ordered_by_number(tmp_path: Path) -> None:
    """`checkpoint_10` is newer than `checkpoint_9`. A warning names folders without a manifest."""
    for number in (9, 10):
        newest = _write_complete(tmp_path / f"checkpoint_{number}", NOW - number)
    assert newest_checkpoint(tmp_path) == newest
    for torn in (tmp_path / "checkpoint_11", tmp_path / "mine"):
        (torn / "pytorch_model_fsdp_0").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"skipped: .*checkpoint_11 has no .*mine has no man"):
        assert newest_checkpoint(tmp_path) == newest


def test_a_folder_that_is_a_checkpoint_itself_is_found(tmp_path: Path) -> None:
    """A training loop may overwrite one folder at every save."""
    _write_complete(tmp_path, NOW)
    assert newest_checkpoint(tmp_path) == tmp_path
    manifest.begin(tmp_path)
    with pytest.warns(UserWarning, match="starting a new run; skipped: .* has no manifest"):
        assert newest_checkpoint(tmp_path) is None


def test_a_warning_names_unfinished_and_stock_folders(tmp_path: Path) -> None:
    manifest.begin(tmp_path / "step-1")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "runs").mkdir()
    with pytest.warns(UserWarning, match="starting a new run; skipped: ") as caught:
        assert newest_checkpoint(tmp_path) is None
    (warning,) = caught
    text = str(warning.message)
    assert "step-1 has no manifest" in text and "checkpoint-2 has no manifest" in text, text
    assert "runs" not in text and warning.filename == __file__


def test_neighbours_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    """`stat` of a link to a too long name fails also for root, like an entry of a dead mount."""
    unreadable = "x" * 300
    (tmp_path / "mount").symlink_to(unreadable)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / manifest.MANIFEST).symlink_to(unreadable)
    with pytest.raises(OSError, match="File name too long"):
        (tmp_path / "mount").stat()
    step = _write_complete(tmp_path / "step-1", NOW)
    assert manifest.find_newest_complete(tmp_path) == step
    with pytest.warns(UserWarning, match="resuming from .*step-1; skipped: .*too long.*step-9"):
        assert newest_checkpoint(tmp_path) == step
    assert find_newest_resumable(tmp_path, re.compile(r"step-1")) == (step, True)


def _find_newest(rank: int, world: int, folder: str) -> str:
    return str(newest_checkpoint(folder if rank == 0 else f"{folder}/not here yet"))


@pytest.mark.slow
def test_every_rank_gets_the_choice_of_rank_0(tmp_path: Path) -> None:
    """A network file system may show a new folder late on some machines."""
    newest = _write_complete(tmp_path / "step-1", 1.0)
    assert run_ranks(_find_newest, 2, str(tmp_path)) == [str(newest)] * 2
