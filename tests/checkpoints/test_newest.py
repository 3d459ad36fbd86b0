"""`newest_checkpoint`: the last complete one, whatever lies beside it, or None."""

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
    """No folder, an empty one, and one in which others keep what is no checkpoint."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").write_text("checkpoint-7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_checkpoint(tmp_path / "nowhere") is None
        assert newest_checkpoint(tmp_path / "runs") is None
        assert newest_checkpoint(tmp_path) is None


def test_the_last_written_one_that_is_complete(tmp_path: Path) -> None:
    """By time, not by name: after going on from step 9 step 10 is newer than what was step 20."""
    _complete(tmp_path / "step-9", 1.0)
    older = _complete(tmp_path / "step-20", 2.0)
    newer = _complete(tmp_path / "step-10", 3.0)
    assert newest_checkpoint(str(tmp_path)) == newer
    (newer / "weights").write_bytes(b"x" * 99)
    with pytest.warns(UserWarning, match=r"going on from .*step-20; passed over: .*99 bytes"):
        assert newest_checkpoint(tmp_path) == older


def test_what_is_not_finished_or_of_the_stock_trainer_is_named(tmp_path: Path) -> None:
    manifest.begin(tmp_path / "step-1")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "runs").mkdir()
    with pytest.warns(UserWarning, match="beginning anew; passed over: ") as caught:
        assert newest_checkpoint(tmp_path) is None
    (warning,) = caught
    text = str(warning.message)
    assert "step-1 has no manifest" in text and "checkpoint-2 has no manifest" in text, text
    assert "runs" not in text and warning.filename == __file__


def _of_rank(rank: int, world: int, folder: str) -> str:
    return str(newest_checkpoint(folder if rank == 0 else f"{folder}/not here yet"))


@pytest.mark.slow
def test_every_rank_goes_on_from_what_rank_0_sees(tmp_path: Path) -> None:
    """Where a file system shows a folder to one machine later than to another."""
    newest = _complete(tmp_path / "step-1", 1.0)
    assert run_ranks(_of_rank, 2, str(tmp_path)) == [str(newest)] * 2
