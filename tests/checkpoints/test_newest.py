"""`newest_checkpoint` returns the last complete checkpoint of a folder, or None."""

import json
import warnings
from pathlib import Path

import pytest
from support.ranks import run_ranks

from hf_moe_ep import newest_checkpoint
from hf_moe_ep.checkpoints.storage import manifest


def _complete(path: Path, when: float) -> Path:
    manifest.begin(path)
    (path / "weights").write_bytes(b"x" * 100)
    manifest.write(path, {"world_size": 1})
    found = json.loads((path / manifest.MANIFEST).read_text())
    found["written"]["time"] = when
    (path / manifest.MANIFEST).write_text(json.dumps(found))
    return path


def test_none_without_a_word(tmp_path: Path) -> None:
    """The folder does not exist, is empty, or holds only files that are no checkpoints."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").write_text("checkpoint-7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_checkpoint(tmp_path / "nowhere") is None
        assert newest_checkpoint(tmp_path / "runs") is None
        assert newest_checkpoint(tmp_path) is None


NOW = 1.8e9
AN_HOUR = 3600.0


def test_the_highest_step_is_the_newest_whatever_the_clock_says(tmp_path: Path) -> None:
    """The machine that wrote the last checkpoint has a clock one hour behind."""
    older = _complete(tmp_path / "step-90", NOW)
    newer = _complete(tmp_path / "step-100", NOW - AN_HOUR)
    assert newest_checkpoint(str(tmp_path)) == newer == manifest.newest_complete(tmp_path)
    (newer / "weights").write_bytes(b"x" * 99)
    with pytest.warns(UserWarning, match=r"resuming from .*step-90; skipped: .*99 bytes"):
        assert newest_checkpoint(tmp_path) == older


def test_without_steps_in_names_the_last_written_one(tmp_path: Path) -> None:
    """The number in the manifest decides; a series has that of its highest step."""
    _complete(tmp_path / "step-200", NOW)
    best = _complete(tmp_path / "best", NOW - AN_HOUR)
    assert newest_checkpoint(tmp_path) == best
    _complete(tmp_path / "step-100", NOW - 3 * AN_HOUR)
    assert newest_checkpoint(tmp_path) == best
    last = _complete(tmp_path / "step-300", NOW - 2 * AN_HOUR)
    assert newest_checkpoint(tmp_path) == last
    numbers = {path.name: manifest.read(path)["number"] for path in tmp_path.iterdir()}
    assert numbers == {"step-200": 1, "best": 2, "step-100": 3, "step-300": 4}


def test_manifests_without_a_number_are_read(tmp_path: Path) -> None:
    """Those of older versions come behind newer ones, by step, else by time."""
    for name, when in (("b", NOW), ("a", NOW + 1), ("step-9", NOW - 1), ("step-10", NOW - 2)):
        path = _complete(tmp_path / name, when)
        found = json.loads((path / manifest.MANIFEST).read_text())
        del found["number"]
        (path / manifest.MANIFEST).write_text(json.dumps(found))
    complete, _ = manifest.complete_in(tmp_path)
    assert [path.name for path in complete] == ["step-9", "step-10", "b", "a"]
    newer = _complete(tmp_path / "c", NOW - AN_HOUR)
    assert newest_checkpoint(tmp_path) == newer


def test_accelerates_own_names(tmp_path: Path) -> None:
    """`checkpoint_N` are ordered by number. A warning names those without a manifest."""
    for number in (9, 10):
        newest = _complete(tmp_path / f"checkpoint_{number}", NOW - number)
    assert newest_checkpoint(tmp_path) == newest
    for torn in (tmp_path / "checkpoint_11", tmp_path / "mine"):
        (torn / "pytorch_model_fsdp_0").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"skipped: .*checkpoint_11 has no .*mine has no man"):
        assert newest_checkpoint(tmp_path) == newest


def test_a_folder_that_is_a_checkpoint_itself(tmp_path: Path) -> None:
    """A loop may save into the same folder each time."""
    _complete(tmp_path, NOW)
    assert newest_checkpoint(tmp_path) == tmp_path
    manifest.begin(tmp_path)
    with pytest.warns(UserWarning, match="starting a new run; skipped: .* has no manifest"):
        assert newest_checkpoint(tmp_path) is None


def test_what_is_not_finished_or_of_the_stock_trainer_is_named(tmp_path: Path) -> None:
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


def _of_rank(rank: int, world: int, folder: str) -> str:
    return str(newest_checkpoint(folder if rank == 0 else f"{folder}/not here yet"))


@pytest.mark.slow
def test_every_rank_goes_on_from_what_rank_0_sees(tmp_path: Path) -> None:
    """A file system may show a folder to one machine later than to another."""
    newest = _complete(tmp_path / "step-1", 1.0)
    assert run_ranks(_of_rank, 2, str(tmp_path)) == [str(newest)] * 2
