"""A finished run ends with code 0, also where gloo's threads still hold tensors when it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def _exit_codes(runs: int, *arguments: str) -> list[str]:
    """The exit codes of both ranks, one line a run."""
    command = [sys.executable, "-m", "support.jobs.interpreter_end", str(runs), *arguments]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_ranks_end_with_code_0() -> None:
    assert _exit_codes(2) == ["0 0"] * 2


@pytest.mark.slow
def test_stock_ranks_are_aborted_there() -> None:
    """If this fails, the test above shows nothing and ranks/interpreter_end.py may go. On a busy
    machine half of the runs end without an abort.
    """
    assert "-6" in " ".join(_exit_codes(15, "stock"))
