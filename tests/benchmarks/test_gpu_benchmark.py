"""benchmarks/gpu.py: a job that fails does not end the run, and every GPU test is in a part."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import end_to_end
import experts
import gpu
import gpu_report
import layer_kernels
import pytest
from support.scripts import ROOT


def _job(name: str, code: str, seconds: float = 20.0, prints: str = "") -> gpu.Job:
    command = f"python -c {shlex.quote(code)}"
    return gpu.Job(name, seconds, command, prints, tiny=command)


def _figure(value: int) -> str:
    return f"print('{{\"figure\": {value}}}', flush=True)"


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "part7.jsonl").read_text().splitlines()]


def _figures(out: Path) -> list[tuple[str, int]]:
    return [(line["job"], line["figure"]) for line in _lines(out) if "figure" in line]


def _endings(out: Path) -> dict[str, str]:
    return {line["job"]: line["ended"] for line in _lines(out) if "ended" in line}


@pytest.mark.slow
def test_a_job_that_dies_or_hangs_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    """The lines that it printed before are kept, and those of a job that prints the wrong word."""
    jobs = [
        _job("good", _figure(1)),
        _job("killed", f"{_figure(2)}; import os; os.kill(os.getpid(), 9)"),
        _job("raises", f"{_figure(3)}; raise OSError('no room')"),
        _job("hangs", f"{_figure(4)}; import time; time.sleep(600)", seconds=15.0),
        _job("silent", _figure(5), prints="passed"),
        gpu.Job("absent", 20.0, "python -V", "", tiny="", tool="no-such-tool --all"),
        _job("last", _figure(6), prints="figure"),
    ]
    bad = gpu.run_part(7, jobs, tmp_path)
    assert bad == ["killed", "raises", "hangs", "silent", "absent"]
    assert [value for _, value in _figures(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert _endings(tmp_path) == {
        "good": "ok",
        "killed": "exit code -9",
        "raises": "exit code 1",
        "hangs": "stopped after 15 s",
        "silent": "did not print passed",
        "absent": "skipped: no no-such-tool on this machine",
        "last": "ok",
    }
    assert "OSError: no room" in (tmp_path / "part7.log").read_text()
    first = _lines(tmp_path)[0]
    assert first["sources"] == gpu.sources() and first["versions"]["torch"]


def test_a_part_ends_in_its_time(tmp_path: Path) -> None:
    """A job gets the time that is left. A job that does not fit into it is skipped with a line."""
    waits = "import time; time.sleep(600)"
    jobs = [_job("long", waits, seconds=600.0), _job("late", _figure(1), seconds=60.0)]
    start = time.monotonic()
    gpu.run_part(7, [jobs[1]], tmp_path, seconds=2.0)
    assert _endings(tmp_path)["late"] == "skipped: no time left in this part"
    gpu.run_part(7, [_job("short", waits, seconds=2.0), *jobs], tmp_path, seconds=3.0)
    assert time.monotonic() - start < 30
    assert _endings(tmp_path)["long"] == "skipped: no time left in this part"


def test_every_part_fits_its_ten_minutes_and_its_programs_take_their_arguments() -> None:
    """An unknown option would otherwise be found on the GPU."""
    parsers = {
        "benchmarks/end_to_end.py": end_to_end.parse,
        "benchmarks/experts.py": experts.parse,
        "benchmarks/layer_kernels.py": layer_kernels.parse,
    }
    parsed = 0
    for number, jobs in gpu.PARTS.items():
        assert sum(job.seconds for job in jobs) <= gpu.PART_SECONDS, number
        assert len({job.name for job in jobs}) == len(jobs)
        for job in jobs:
            for rehearsal in (False, True):
                words = job.words(rehearsal)
                script = next((word for word in words if word in parsers), None)
                if script is not None:
                    parsers[script](words[words.index(script) + 1 :])
                    parsed += 1
    assert parsed >= 20


def test_every_gpu_test_is_in_part_3() -> None:
    """A new GPU test must be added there, or no GPU ever runs it."""
    words = " ".join(job.command for job in gpu.PARTS[3]).split()
    chosen = [word for word in words if word.startswith("tests/")]
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    assert len(marked) >= 5
    assert not [path for path in marked if not path.startswith(tuple(chosen))]


@pytest.mark.slow
def test_every_selection_of_gpu_tests_selects_some() -> None:
    for job in (job for jobs in gpu.PARTS.values() for job in jobs if "pytest" in job.command):
        words = [*job.words(rehearsal=False), "--collect-only"]
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, f"{job.name}: {done.stdout[-2000:]}"


@pytest.mark.slow
def test_the_rehearsal_runs_every_job(tmp_path: Path) -> None:
    """Sizes are tiny and run on the CPU. The report reads the files that the rehearsal wrote."""
    raw = tmp_path / "raw"
    words = [sys.executable, "benchmarks/gpu.py", "rehearsal", "--out", str(raw)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2700
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ended = [line for line in gpu_report.read(raw) if "ended" in line]
    names = [(number, job.name) for number, jobs in gpu.PARTS.items() for job in jobs]
    assert [(line["part"], line["job"]) for line in ended] == names
    assert {line["ended"] for line in ended} == {"ok"}
    assert gpu_report.write(tmp_path) == 0
    page = (tmp_path / "figures.md").read_text()
    for title in ("Ceilings", "One layer", "Its kernels", "Training", "First losses", "Jobs"):
        assert f"## {title}" in page, title
    assert "A rehearsal on a CPU" in page and (tmp_path / "figures.png").exists()
