"""benchmarks/gpu.py continues after a failed job, and its parts contain every GPU test."""

import functools
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


def _make_job(name: str, code: str, seconds: float = 20.0, prints: str = "") -> gpu.Job:
    command = f"python -c {shlex.quote(code)}"
    return gpu.Job(name, seconds, command, prints, tiny=command)


def _make_figure_code(value: int) -> str:
    return f"print('{{\"figure\": {value}}}', flush=True)"


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "part7.jsonl").read_text().splitlines()]


def _read_figures(folder: Path) -> list[tuple[str, int]]:
    return [(line["job"], line["figure"]) for line in _read_lines(folder) if "figure" in line]


def _read_endings(folder: Path) -> dict[str, str]:
    return {line["job"]: line["ended"] for line in _read_lines(folder) if "ended" in line}


@pytest.mark.slow
def test_jobs_that_fail_or_hang_are_recorded_and_the_next_job_runs(tmp_path: Path) -> None:
    """The figures that such a job has printed before are recorded as well."""
    jobs = [
        _make_job("good", _make_figure_code(1)),
        _make_job("killed", f"{_make_figure_code(2)}; import os; os.kill(os.getpid(), 9)"),
        _make_job("raises", f"{_make_figure_code(3)}; raise OSError('no room')"),
        _make_job("hangs", f"{_make_figure_code(4)}; import time; time.sleep(600)", seconds=15.0),
        _make_job("silent", _make_figure_code(5), prints="passed"),
        gpu.Job("absent", 20.0, "python -V", "", tiny="", tool="no-such-tool --all"),
        _make_job("last", _make_figure_code(6), prints="figure"),
    ]
    failed = gpu.run_part(7, jobs, tmp_path)
    assert failed == ["killed", "raises", "hangs", "silent", "absent"]
    assert [value for _, value in _read_figures(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert _read_endings(tmp_path) == {
        "good": "ok",
        "killed": "exit code -9",
        "raises": "exit code 1",
        "hangs": "stopped after 15 s",
        "silent": "did not print passed",
        "absent": "skipped: no no-such-tool on this machine",
        "last": "ok",
    }
    assert "OSError: no room" in (tmp_path / "part7.log").read_text()
    header = _read_lines(tmp_path)[0]
    assert header["sources"] == gpu.hash_sources() and header["versions"]["torch"]


@pytest.mark.slow
def test_a_stopped_job_prints_what_it_has_collected(tmp_path: Path) -> None:
    """ncu prints its tables at the end, also after an interrupt. A job that goes on is killed."""
    waits = "import time; time.sleep(600)"
    collects = f"try:\n {waits}\nexcept KeyboardInterrupt:\n {_make_figure_code(1)}"
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {waits}"
    jobs = [_make_job("collects", collects, 8.0), _make_job("deaf", deaf, 8.0)]
    start = time.monotonic()
    assert gpu.run_part(7, jobs, tmp_path) == ["collects", "deaf"]
    assert time.monotonic() - start < 8 + 8 + gpu.GRACE_SECONDS + 20
    assert _read_figures(tmp_path) == [("collects", 1)]
    assert set(_read_endings(tmp_path).values()) == {"stopped after 8 s"}


@pytest.mark.slow
def test_a_process_that_outlives_its_job_does_not_end_the_part(tmp_path: Path) -> None:
    """Compilers have workers in sessions of their own, which write to the folder of the job."""
    writes = (
        "import itertools, os, time; folder = os.environ['TMPDIR']; end = time.time() + 6\n"
        "for n in itertools.count():\n"
        " if time.time() > end: break\n"
        " os.close(os.open(f'{folder}/{n}', os.O_CREAT))\n"
    )
    leaves = "import subprocess, sys, time; "
    leaves += f"subprocess.Popen([sys.executable, '-c', {writes!r}], start_new_session=True); "
    leaves += "time.sleep(2)"
    jobs = [_make_job("leaves a process", leaves), _make_job("last", _make_figure_code(6))]
    assert gpu.run_part(7, jobs, tmp_path) == []
    assert _read_figures(tmp_path) == [("last", 6)]


@pytest.mark.slow
def test_failures_of_tests_that_are_stopped_are_in_the_log(tmp_path: Path) -> None:
    """pytest itself prints failures at the end of a run, which a stopped run does not reach."""
    test_file = tmp_path / "test_stopped.py"
    test_file.write_text(
        "import time\ndef test_passes(): pass\ndef test_fails(): assert 'this' == 'that'\n"
        "def test_hangs(): time.sleep(99)\n"
    )
    assert "-p support.at_once" in gpu.PARTS[1][1].command
    command = f"python -m pytest -q -p support.at_once -p no:cacheprovider {test_file}"
    job = gpu.Job("stopped", 8.0, command, "passed", tiny=command)
    assert gpu.run_part(7, [job], tmp_path) == ["stopped"]
    assert _read_endings(tmp_path) == {"stopped": "stopped after 8 s, 1 tests passed"}
    assert "assert 'this' == 'that'" in (tmp_path / "part7.log").read_text()


@pytest.mark.parametrize(
    "output",
    [
        ["...s.F", "==== test_a.py::test_b failed", "", "assert 1 == 2", ".. [ 40%]"],
        ["test_a.py::test_b PASSED [ 50%]", "[gw0] [ 99%] PASSED test_a.py::test_c", "x FAILED"]
        + ["[gw0] PASSED x"] * 4,
    ],
    ids=["-q", "-vv"],
)
def test_passed_tests_of_a_stopped_run_are_counted(output: list[str]) -> None:
    assert gpu._count_passed_tests(output) == 6


@pytest.mark.slow
def test_a_part_ends_within_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is stopped when the time of the part is over. A job that needs more time is skipped."""
    probe = functools.cache(lambda: time.sleep(3.0))  # a first job starts after this probe
    monkeypatch.setattr(gpu, "has_expandable_segments", probe)
    start = time.monotonic()
    gpu.run_part(7, [_make_job("first", "import time; time.sleep(9)", 4.0)], tmp_path, seconds=5.0)
    assert time.monotonic() - start < 6.0
    waits = "import time; time.sleep(600)"
    jobs = [
        _make_job("long", waits, seconds=600.0),
        _make_job("late", _make_figure_code(1), seconds=60.0),
    ]
    start = time.monotonic()
    gpu.run_part(7, [jobs[1]], tmp_path, seconds=2.0)
    assert _read_endings(tmp_path)["late"] == "skipped: no time left in this part"
    gpu.run_part(7, [_make_job("short", waits, seconds=2.0), *jobs], tmp_path, seconds=3.0)
    assert time.monotonic() - start < 30
    assert _read_endings(tmp_path)["long"] == "skipped: no time left in this part"


@pytest.mark.slow
def test_a_second_part_gets_the_time_that_the_first_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is rented for minutes must not wait between two commands."""
    waits = "import time; time.sleep(600)"
    parts = {
        6: [_make_job("first", "import time; time.sleep(8)"), _make_job("not chosen", waits)],
        7: [_make_job("first again", waits, seconds=12.0)],
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "has_expandable_segments", lambda: False)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 1.0)
    monkeypatch.setenv("OUT", str(tmp_path))
    words = ["gpu.py", "6", "--then", "7", "--only", "first", "--seconds", "14"]
    monkeypatch.setattr(sys, "argv", words)
    start = time.monotonic()
    assert gpu.main() == 1
    assert 13 < time.monotonic() - start < 19
    assert _read_endings(tmp_path)["first again"].startswith("stopped after")
    first = [json.loads(text) for text in (tmp_path / "part6.jsonl").read_text().splitlines()]
    assert [line["job"] for line in first if "ended" in line] == ["first"]


def test_every_part_fits_its_time_and_its_scripts_know_their_options() -> None:
    """Without this test, an unknown option would stop a job only on the GPU machine."""
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


def test_every_gpu_test_is_in_a_part() -> None:
    """A new GPU test must be added to a job. Otherwise it never runs on a GPU."""
    jobs = [job for jobs in gpu.PARTS.values() for job in jobs if " -k " not in job.command]
    words = " ".join(job.command for job in jobs).split()
    chosen = [word for word in words if word.startswith("tests/")]
    assert not [path for path in _list_files_with_gpu_tests() if not path.startswith(tuple(chosen))]


def _list_files_with_gpu_tests() -> list[str]:
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    assert len(files) >= 5
    return files


@pytest.mark.slow
@pytest.mark.rehearsal
def test_every_pytest_job_selects_tests() -> None:
    for job in (job for jobs in gpu.PARTS.values() for job in jobs if "pytest" in job.command):
        words = [*job.words(rehearsal=False), "--collect-only"]
        result = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
        )
        assert result.returncode == 0, f"{job.name}: {result.stdout[-2000:]}"


@pytest.mark.slow
def test_gpu_tests_are_collected_on_a_machine_without_peft() -> None:
    """If a file cannot be imported, pytest runs no test at all."""
    words = ["--collect-only", "-q", "-m", "gpu", *_list_files_with_gpu_tests()]
    code = "import pytest, sys; sys.modules['peft'] = None; sys.exit(pytest.main())"
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.rehearsal
def test_the_rehearsal_runs_every_job(tmp_path: Path) -> None:
    """The rehearsal runs tiny sizes on the CPU. The report is made from its files."""
    raw = tmp_path / "raw"
    words = [sys.executable, "benchmarks/gpu.py", "rehearsal", "--out", str(raw)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=2700)
    ended = [line for line in gpu_report.read(raw) if "ended" in line]
    names = [(number, job.name) for number, jobs in gpu.PARTS.items() for job in jobs]
    assert [(line["part"], line["job"]) for line in ended] == names
    assert {line["ended"] for line in ended} == {"ok"}
    assert gpu_report.write(tmp_path) == 0
    page = (tmp_path / "figures.md").read_text()
    for title in ("Ceilings", "One layer", "Its kernels", "Training", "First losses", "Jobs"):
        assert f"## {title}" in page, title
    assert "A rehearsal on a CPU" in page and (tmp_path / "figures.png").exists()
