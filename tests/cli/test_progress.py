"""Long commands report their progress on stderr, and dates and errors have a readable form."""

import functools
import re
from pathlib import Path

import pytest
import torch
import tqdm
from safetensors.torch import save_file

from hf_moe_ep.checkpoints.verify import Found
from hf_moe_ep.cli import progress
from hf_moe_ep.cli.main import main
from hf_moe_ep.cli.printing import print_found
from hf_moe_ep.cli.progress import Progress
from hf_moe_ep.upstream.hub import make_progress_bar


@pytest.mark.parametrize(
    ("seconds", "disabled", "expected"),
    [(1.9, "", ""), (3.0, "", "layout 2, 3 s: b\n"), (3.0, "0", "layout 2, 3 s: b\n")]
    + [(3.0, "1", "")],
)
def test_an_item_is_printed_if_two_seconds_have_passed(
    seconds: float,
    disabled: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    now = iter([100.0, 101.0, 100.0 + seconds])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    shown = Progress("layout")
    shown.finished("a")
    shown.finished("b")
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("disabled", [False, True])
def test_tqdm_disable_turns_progress_bars_off(
    disabled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tqdm reads TQDM_DISABLE when it is imported, as the default of an argument (`envwrap`)."""
    with_default = functools.partialmethod(tqdm.tqdm.__init__, disable=disabled)
    monkeypatch.setattr(tqdm.tqdm, "__init__", with_default)
    with make_progress_bar(5, "reading base", True) as bar:
        bar.update(5)
    assert ("reading base" in capsys.readouterr().err) == (not disabled)


def test_times_are_printed_as_dates(capsys: pytest.CaptureFixture[str]) -> None:
    print_found("out", Found("a training checkpoint", {"time": "1767225600.25", "bytes": "7"}))
    assert re.search(r"time +2026-01-01 00:00:00 UTC\n", capsys.readouterr().out)


def test_verify_without_hashes_says_that_contents_were_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert main(["verify", str(tmp_path)]) == 0
    assert f"{tmp_path}: headers only, contents were not checked\n" in capsys.readouterr().out


def test_one_error_names_all_missing_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert all(flag in err for flag in ("--gpus", "--seq", "--batch", "--gpu-memory")), err
    assert main(["memory", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "--gpus" in err and "'nowhere' is not a known model (Qwen/Qwen3-30B-A3B" in err, err
