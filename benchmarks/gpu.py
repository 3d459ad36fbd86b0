"""Run all measurements and tests that need a GPU, in parts of at most ten minutes.

    make gpu PART=1          main results: tests of one device, one layer and training against stock
    make gpu PART=2          more tests of kernels, ranks that share the GPU, compiled layers, LoRA
    make gpu PART=3          all tests of the kernels, the memory sanitizer
    make gpu PART=4          other blocks for the kernels, longer batches, adapters, counters
    make gpu PART=5          frozen nf4 and fp8 experts: their tests, and their speed next to bf16
    make gpu PART=6          kernels compiled ahead of time: registers, shared memory, loops
    make gpu PART=7          a smaller model with LoRA, and Liger's experts
    make gpu-rehearsal       all parts on the CPU with tiny sizes (part 6 in full), in 20 minutes
    python benchmarks/gpu.py 2 --seconds 300     ends part 2 after 300 s
    python benchmarks/gpu.py 1 --then 2          part 2 follows in the time that part 1 leaves
    python benchmarks/gpu.py report benchmarks/results/GPU      writes tables and a plot

A part is a list of jobs, the most valuable job first. Each job runs in its own process group. If a
job crashes, hangs, runs out of memory, or is skipped because its part has no time left, the part
records this in a line of JSON and continues with the next job. All output is written to `partN.log`
immediately, and each line of JSON in the output also to `partN.jsonl`, with the name of the job. So
all measurements are on disk, even if the run is killed. The folder is $OUT, or
benchmarks/results/GPU/raw if $OUT is not set.

This module does not import torch, so that it can record even a broken installation.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# A part may take ten minutes. 30 s of them are for its start and for copying the results.
PART_SECONDS = 570.0
# A job is skipped if less than this time is left, or less than a third of its time limit.
LEAST_SECONDS = 15.0
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "liger_kernel", "pytest")
GPU_FIELDS = "name driver_version clocks.sm clocks.mem clocks.max.sm power.draw power.limit"
GPU_FIELDS += " temperature.gpu memory.used"
SAMPLE_SECONDS = 5.0
# A job that is stopped has this time to print what it prints at its end, such as ncu's tables.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """One job of a part.

    Attributes:
        seconds: the time limit of the job.
        prints: a regular expression that must match the output.
        tiny: the command of the rehearsal.
        tool: a profiler or checker that runs `command`.
        variables: further environment variables, as "NAME=value NAME=value".
        beside: a command that runs at the same time and prepares later jobs. It is killed when the
            job ends, and its output is in a separate log. A job that measures has no such command.
    """

    name: str
    seconds: float
    command: str
    prints: str
    tiny: str
    tool: str = ""
    variables: str = ""
    beside: str = ""

    def line(self, rehearsal: bool) -> str:
        """Return the command as a line of shell."""
        return self.tiny if rehearsal else f"{self.tool} {self.command}".strip()

    def words(self, rehearsal: bool) -> list[str]:
        """Return the words of the command, with this interpreter as `python`."""
        return _words(self.line(rehearsal))


def _words(line: str) -> list[str]:
    """Split a line of shell into words, with this interpreter as `python`."""
    return [sys.executable if word == "python" else word for word in shlex.split(line)]


_LAYER = "python benchmarks/layer_kernels.py"
_TINY_LAYER = f"{_LAYER} --tokens 24 --experts 4 --top-k 2 --hidden 32 --ffn 32 --repeats 1"
_EXPERTS = "python benchmarks/experts.py --json"
_STOCK = "--only ours grouped_mm eager"
_TINY_EXPERTS = f"{_EXPERTS} --tokens 64 --repeats 2"
_TRAIN = "python benchmarks/end_to_end.py"
_TINY_TRAIN = f"{_TRAIN} --tiny --steps 1"
_LORA_48 = "--mode lora --layers 48 --vocab 151936 --rows 1 --checkpointing"
_LORA_24 = "--mode lora --layers 24 --vocab 75968 --rows 2 --checkpointing"
# Adapters of rank 16 on a frozen base, in bf16 or quantised.
_FROZEN = f"{_LAYER} --adapter-rank 16 --repeats 5"
# The rehearsal has no adapters on a quantised base, because its blocks of scales are so large that
# the interpreter would be slow. The tests cover this case.
_TINY_FROZEN = f"{_LAYER} --tokens 4 --experts 2 --top-k 1 --repeats 1"
_TINY_NF4 = f"{_TINY_FROZEN} --hidden 64 --ffn 64 --quantised nf4"
_TINY_FP8 = f"{_TINY_FROZEN} --hidden 128 --ffn 128 --quantised fp8"
# If a file cannot be imported, the tests of the other files run nevertheless.
_TESTS = "python -m pytest -q -m 'gpu and not slow' -p support.at_once"
_TESTS += " --continue-on-collection-errors"
_ON_ONE_GPU = "tests/dispatch/test_one_rank.py tests/moe/test_recompute.py"
_PLANS = "tests/planner/test_plan_on_gpu.py"
_SECTIONS = " --section ".join(
    ("", "SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
)
# torch and Triton ask CUDA's driver for functions that it may not have, and handle the errors. The
# sanitizer would count them.
_SANITIZER = "compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"
# Each tensor gets its own allocation, because the sanitizer sees no out-of-bounds access within one
# block of the caching allocator.
_OWN_ALLOCATIONS = "PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTORCH_ALLOC_CONF=backend:native"
PARTS: dict[int, list[Job]] = {
    # The most important job is the first one. On an H100, the part took about half its time limits.
    1: [
        Job(
            "machine",
            30,
            "python benchmarks/gpu.py machine",
            r'"device": "(?!cpu)',
            "python benchmarks/gpu.py machine",
        ),
        Job(
            "kernels with full blocks",
            90,
            f"{_TESTS} -n 4 tests/ops/test_production_row.py",
            r"\d+ passed",
            f"{_TESTS} tests/ops/test_production_row.py",
            beside=f"{_LAYER} --tokens 32768 --compile-only --seconds 90 --workers 10",
        ),
        Job(
            "one case of ranks that share a GPU",
            # Imports take 20 s. After 60 s, the test prints the stacks of ranks that hang.
            90,
            f"{_TESTS} -vv tests/claims/test_shared_device.py -k cuda-2-fp64-ep",
            r"\d+ passed",
            "python -m pytest -q -p support.at_once tests/claims/test_shared_device.py"
            " -k cpu-2-fp64-ep",
        ),
        Job(
            "one device",
            120,
            f"{_TESTS} -s tests/claims/test_one_device.py {_ON_ONE_GPU} {_PLANS}",
            r"\d+ passed",
            f"{_TESTS} tests/claims/test_one_device.py {_ON_ONE_GPU}",
        ),
        Job(
            "kernels, 32k tokens", 50, f"{_LAYER} --tokens 32768", r'"kernel": "whole"', _TINY_LAYER
        ),
        Job(
            "layer against stock",
            75,
            f"{_EXPERTS} --shapes qwen3-30b --tokens 32768 4096 --repeats 10 {_STOCK}",
            r'"implementation": "ours".*"both_tflops"',
            _TINY_EXPERTS,
        ),
        Job(
            "full, 16k tokens",
            80,
            f"{_TRAIN} --profile --seconds 38",
            r'"losses_of": "ours"',
            f"{_TINY_TRAIN} --profile",
        ),
        Job(
            "ceilings",
            30,
            "python benchmarks/ceilings.py",
            r'"copy_tb_per_s"',
            "python benchmarks/ceilings.py",
        ),
    ],
    2: [
        Job(
            "chosen tests of the kernels",
            # On an H100, 14 tests took 53 s in 6 processes. These are 56 tests in 15 processes. The
            # run whose messages were lost had begun with `test_adapters.py`.
            140,
            f"{_TESTS} -n 15 tests/ops/test_adapters.py tests/ops/test_expert_mlp.py"
            " tests/ops/test_permute.py"
            " -k 'edge_cases or repeats or strided or frozen or silu-triton or clamped-'",
            r"\d+ passed",
            f"{_TESTS} tests/ops/test_permute.py",
        ),
        Job(
            "ranks that share a GPU",
            # 16 cases with 2 or 4 ranks run in 4 processes, in 4 rounds. Imports take 20 s.
            150,
            f"{_TESTS} -vv -n 4 tests/claims/test_shared_device.py",
            r"\d+ passed",
            "python -m pytest -q -p support.at_once tests/claims/test_shared_device.py"
            " -k cpu-2-fp32-ep",
        ),
        Job(
            "full, 16k tokens, compiled layers",
            140,
            f"{_TRAIN} --compiled --profile --seconds 68",
            r'"losses_of": "ours"',
            f"{_TINY_TRAIN} --compiled --sides ours",
        ),
        Job(
            "LoRA, 48 layers",
            120,
            f"{_TRAIN} {_LORA_48} --profile --seconds 58",
            r'"end_to_end": "ours".*"tok_per_s"',
            f"{_TINY_TRAIN} --mode lora --checkpointing --profile",
        ),
    ],
    3: [
        Job(
            "all tests of the kernels",
            # About 150 of 250 tests compile kernels. On an H100, such a test took 22 s (with 6
            # processes) to 74 s (with 12 processes), so 15 processes need 220 to 740 s.
            490,
            f"{_TESTS} -n 15 tests/ops",
            r"\d+ passed",
            f"{_TESTS} -n 2 tests/ops",
        ),
        Job(
            "memory checker",
            70,
            f"{_LAYER} --experts 8 --tokens 300 --top-k 2 --repeats 1",
            r"ERROR SUMMARY: 0 errors",
            _TINY_LAYER,
            tool=_SANITIZER,
            variables=_OWN_ALLOCATIONS,
        ),
    ],
    4: [
        Job(
            "other blocks, 32k tokens",
            110,
            f"{_LAYER} --tokens 32768 --sweep --seconds 100 --repeats 5",
            r'"best"',
            f"{_TINY_LAYER} --sweep --seconds 30 --workers 0 --most 3",
        ),
        # 256 and 64 rows per expert use the rows "some" and "few" of the table of blocks.
        *(
            Job(
                f"other blocks, {tokens // 1024}k tokens",
                70,
                f"{_LAYER} --tokens {tokens} --sweep --seconds 60 --repeats 5",
                r'"best"',
                f"{_TINY_LAYER} --sweep --seconds 30 --workers 1 --most 2",
            )
            for tokens in (4096, 1024)
        ),
        Job(
            "full, 32k tokens",
            130,
            f"{_TRAIN} --rows 8 --steps 3 --seconds 45 --sides ours grouped_mm ours_recompute",
            r'"end_to_end": "ours".*"tok_per_s"',
            f"{_TINY_TRAIN} --sides ours ours_recompute",
        ),
        Job(
            "kernels with adapters",
            45,
            f"{_LAYER} --tokens 32768 --adapter-rank 16",
            r'"kernel": "whole"',
            f"{_TINY_LAYER} --adapter-rank 4",
        ),
        Job(
            "layer, other shapes",
            70,
            f"{_EXPERTS} --tokens 8192 --repeats 5 {_STOCK}",
            r'"implementation": "ours".*"both_tflops"',
            _TINY_EXPERTS,
        ),
        Job(
            "counters",
            40,
            f"{_LAYER} --tokens 32768 --repeats 1",
            r"Memory Throughput",
            f"{_TINY_LAYER}",
            tool=f"ncu --clock-control none --nvtx --nvtx-include one_call/{_SECTIONS}",
        ),
    ],
    5: [
        Job(
            "bytes are right",
            # bf16 with adapters of rank 16, in both formats, and the tests of single tiles.
            90,
            f"{_TESTS} -n 5 tests/ops/test_byte_kernels.py"
            " -k '16-sizes1-cuda-dtype1 or by_hand or every_byte'",
            r"\d+ passed",
            f"{_TESTS} tests/ops/test_byte_kernels.py",
        ),
        *(
            Job(
                f"{name}, {tokens} tokens",
                45,
                f"{_FROZEN} --tokens {tokens} {options}".strip(),
                r'"kernel": "whole"',
                tiny,
            )
            for tokens in (32768, 1024)
            for name, options, tiny in (
                ("bf16", "", f"{_TINY_FROZEN} --hidden 64 --ffn 64 --adapter-rank 4"),
                ("nf4", "--quantised nf4", _TINY_NF4),
                ("fp8", "--quantised fp8", _TINY_FP8),
            )
        ),
        Job(
            "memory checker, bytes",
            70,
            f"{_LAYER} --experts 8 --tokens 300 --top-k 2 --repeats 1 --quantised nf4",
            r"ERROR SUMMARY: 0 errors",
            _TINY_NF4,
            tool=_SANITIZER,
            variables=_OWN_ALLOCATIONS,
        ),
        Job(
            "all tests of bytes",
            # 36 tests compile two kinds of kernels each. At the rates of part 3, they need 60 to
            # 180 s.
            140,
            f"{_TESTS} -n 15 tests/ops/test_byte_kernels.py",
            r"\d+ passed",
            f"{_TESTS} -n 2 tests/ops/test_byte_kernels.py",
        ),
    ],
    6: [
        Job(
            "machine code",
            400,
            "python benchmarks/compile_kernels.py --check",
            r"kernels compiled, 0 problems",
            "python benchmarks/compile_kernels.py --check",
            # The rehearsal runs all other jobs in Triton's interpreter.
            variables="TRITON_INTERPRET=0",
        ),
        # Compiles all kernels for sm_90 in one process, and launches them without a GPU.
        Job(
            "legal launches",
            170,
            "python benchmarks/launch_steps.py",
            r"cases, 0 problems",
            "python benchmarks/launch_steps.py",
            variables="TRITON_INTERPRET=0",
        ),
    ],
    7: [
        Job(
            "LoRA, 24 layers, 8k tokens",
            100,
            f"{_TRAIN} {_LORA_24} --seconds 48",
            r'"end_to_end": "ours".*"tok_per_s"',
            f"{_TINY_TRAIN} --mode lora --sides ours",
        ),
        Job(
            "layer against Liger",
            # Liger's first call tries many blocks.
            120,
            f"{_EXPERTS} --shapes qwen3-30b --tokens 32768 --repeats 5"
            " --only ours grouped_mm liger",
            r'"implementation": "liger".*"both_tflops"',
            _TINY_EXPERTS,
        ),
    ],
}


@dataclass
class Ended:
    """The end of a job. `status` is "ok" or the reason why the job failed."""

    status: str
    seconds: float
    output: str
    gpu: dict[str, Any]


def run_part(
    number: int,
    jobs: list[Job],
    out: Path,
    *,
    rehearsal: bool = False,
    seconds: float = PART_SECONDS,
) -> list[str]:
    """Run the jobs in order. Returns the names of the jobs that failed or were skipped."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    if not rehearsal:
        has_expandable_segments()  # The first call takes up to a minute.
    bad = []
    with (
        (out / f"part{number}.log").open("ab") as log,
        (out / f"part{number}.jsonl").open("a") as lines,
    ):
        _write_line(lines, {"part": number, "rehearsal": rehearsal, **describe_run()})
        for job in jobs:
            about = {"part": number, "job": job.name}
            ended = _run_job(job, log, lines, about, deadline, rehearsal)
            result = {"ended": ended.status, "seconds": round(ended.seconds, 1)}
            command = {"command": job.line(rehearsal)}
            _write_line(lines, {**about, **result, **command, "gpu": ended.gpu})
            _print_result(job, ended)
            if ended.status != "ok":
                bad.append(job.name)
    return bad


def _run_job(
    job: Job, log: IO[bytes], lines: IO[str], about: dict, deadline: float, rehearsal: bool
) -> Ended:
    left = deadline - time.monotonic()
    words = job.words(rehearsal)
    if left < min(LEAST_SECONDS, job.seconds) or left < job.seconds / 3:
        return Ended("skipped: no time left in this part", 0.0, "", {})
    if shutil.which(words[0]) is None:
        return Ended(f"skipped: no {words[0]} on this machine", 0.0, "", {})
    log.write(f"\n==== {job.name}: {job.line(rehearsal)}\n".encode())
    log.flush()
    start = time.monotonic()
    # A process that outlives a stopped job may still write there. This must not end the part.
    with tempfile.TemporaryDirectory(prefix="gpu_job_", ignore_cleanup_errors=True) as folder:
        env = make_environment(os.environ, rehearsal, folder)
        env |= dict(pair.split("=", 1) for pair in job.variables.split())
        # Other programs may run on the machine of a rehearsal, so a job gets more time there.
        seconds = min(2 * job.seconds if rehearsal else job.seconds, left)
        with _run_beside(job, env, Path(log.name).with_suffix(".beside.log"), rehearsal):
            status, output, gpu = run(words, env, seconds, log, lines, about)
    if status == "ok" and not rehearsal and not re.search(job.prints, output):
        status = f"did not print {job.prints}"
    return Ended(status, time.monotonic() - start, output, gpu)


def make_environment(base: Mapping[str, str], rehearsal: bool, folder: str) -> dict[str, str]:
    """Return the environment of a job. `folder` is an empty folder for its temporary files."""
    env = {**base, "PYTHONUNBUFFERED": "1", "TMPDIR": folder, "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), base.get("PYTHONPATH", "")]
    )
    env["PYTHONHASHSEED"] = "0"
    if not rehearsal and has_expandable_segments():
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # With this variable, torch.cuda.is_available() asks NVML, so that processes which are forked
    # later can still use the GPU.
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # All jobs of all parts share compiled kernels.
    env.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir(), "hf_moe_ep_triton_cache")))
    if rehearsal:
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return env


@functools.cache
def has_expandable_segments() -> bool:
    """Return True if the driver allows expandable segments. If it does not, they kill every job."""
    code = "import torch; torch.ones(2**24, device='cuda').sum().item()"
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    try:
        return not subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def run(
    words: list[str],
    env: dict[str, str],
    seconds: float,
    log: IO[bytes],
    lines: IO[str],
    about: dict[str, Any],
) -> tuple[str, str, dict[str, Any]]:
    """Run a command, then kill its process group. Returns (status, output, state of the GPU).

    The command writes directly to the log, so its output is on disk even if this process is killed.
    """
    with open(log.name, "rb") as reader, _start_process(words, env, log) as process:
        reader.seek(0, os.SEEK_END)
        output, rest = [], b""
        samples: list[dict[str, float]] = []
        deadline, next_sample = time.monotonic() + seconds, 0.0
        status = ""
        while not status:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                status = "ok" if code == 0 else f"exit code {code}"
            if not status and time.monotonic() >= deadline:
                _interrupt(process)
                status = f"stopped after {seconds:.0f} s"
            if time.monotonic() >= next_sample:
                samples += [sample] if (sample := ask_gpu()) else []
                next_sample = time.monotonic() + SAMPLE_SECONDS
            text = rest + reader.read()
            *whole, rest = text.split(b"\n")
            for line in whole:
                output.append(line.decode(errors="replace"))
                _copy_json(output[-1], lines, about)
        output.append(rest.decode(errors="replace"))
    if status.startswith("stopped") and "pytest" in words:
        status += f", {_count_passed_tests(output)} tests passed"
    return status, "\n".join(output), _summarise_samples(samples)


def _count_passed_tests(lines: list[str]) -> int:
    """Count the passed tests in the output of pytest, which may have been stopped."""
    results = (re.fullmatch(r"([.FEsxX]+)(\s+\[\s*\d+%\])?", line.strip()) for line in lines)
    return sum(result[1].count(".") for result in results if result) + sum(
        bool(re.search(r"\bPASSED\b", line)) for line in lines
    )


@contextmanager
def _run_beside(job: Job, env: dict[str, str], path: Path, rehearsal: bool) -> Iterator[None]:
    """Run the command `job.beside` at the same time, except in a rehearsal."""
    if rehearsal or not job.beside:
        yield
        return
    with path.open("ab") as log, _start_process(_words(job.beside), env, log):
        yield


@contextmanager
def _start_process(
    words: list[str], env: dict[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        words,
        env=env,
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A script in the background of a shell ignores SIGINT, and its jobs would inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        _kill(process)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Stop a process as Ctrl-C does. After GRACE_SECONDS, kill it and all that it has started."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it has started, which would keep GPU memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that waits in the driver cannot be killed, and must not delay the next job.
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)


def _copy_json(text: str, lines: IO[str], about: dict[str, Any]) -> None:
    if text.startswith("{"):
        with suppress(json.JSONDecodeError):
            _write_line(lines, {**about, **json.loads(text)})


def _write_line(lines: IO[str], line: dict[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")
    lines.flush()
    os.fsync(lines.fileno())


def _print_result(job: Job, ended: Ended) -> None:
    """Print the status of a job, and its last lines of JSON (after a failure, of output)."""
    print(f"==== {job.name}: {ended.status}, {ended.seconds:.0f} s", flush=True)
    text_lines = [line for line in ended.output.splitlines() if line.strip()]
    json_lines = [line for line in text_lines if line.startswith("{")]
    shown = json_lines[-12:] if json_lines and ended.status == "ok" else text_lines[-12:]
    print("\n".join(line[:300] for line in shown), flush=True)


def ask_gpu() -> dict[str, Any]:
    """Query the first GPU with nvidia-smi. Returns an empty dict without a GPU."""
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(GPU_FIELDS.split())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    first, *_ = [*text.splitlines(), ""]
    values = [value.strip() for value in first.split(",")]
    return {
        name: float(value) if re.fullmatch(r"[\d.]+", value) and name != "driver_version" else value
        for name, value in zip(GPU_FIELDS.split(), values, strict=False)
    }


def _summarise_samples(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the minimum, median and maximum of the values that change while a job runs."""
    names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")
    series = {name: [s[name] for s in samples if isinstance(s.get(name), float)] for name in names}
    return {
        name: [min(values), statistics.median(values), max(values)]
        for name, values in series.items()
        if values
    }


def describe_run() -> dict[str, Any]:
    """Return what is needed to repeat a measurement, such as the commit, versions and the GPU."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": find_commit(),
        "sources": hash_sources(),
        "versions": versions,
        "gpu": ask_gpu(),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
    }


def find_commit() -> str:
    """Return $COMMIT, or git's description of the commit. A copied folder may have no history."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with suppress(OSError):
        described = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        return os.environ.get("COMMIT") or described or "unknown"
    return os.environ.get("COMMIT", "unknown")


def hash_sources() -> str:
    """Return a hash of the package and the benchmarks, which identifies the measured sources."""
    digest = hashlib.sha256()
    for folder in ("hf_moe_ep", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def print_machine() -> int:
    """Print the versions of the software, and the properties of the GPU that torch reports."""
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    import torch

    line: dict[str, Any] = {"device": "cpu", **describe_run(), "torch_cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(0)
        line |= {
            "device": properties.name,
            # `run_part` has asked the driver, and another question would take 10 s.
            "expandable_segments": "expandable" in os.environ.get("PYTORCH_ALLOC_CONF", ""),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 2),
            "l2_mib": properties.L2_cache_size / 2**20,
            "capability": torch.cuda.get_device_capability(0),
        }
        line["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    line["liger"] = importlib.util.find_spec("liger_kernel") is not None
    print(json.dumps(line), flush=True)
    return 0


def find_results_folder() -> Path:
    """Return $OUT, or the folder of this GPU under benchmarks/results."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    name = str(ask_gpu().get("name", "no-gpu"))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / slug / "raw"


def rehearse(out: Path, only: list[int]) -> int:
    """Run every job with tiny sizes on the CPU. Returns 1 if a job failed."""
    start = time.monotonic()
    bad = []
    for number in only:
        bad += run_part(number, PARTS[number], out, rehearsal=True, seconds=1200.0)
    print(f"rehearsal: {time.monotonic() - start:.0f} s, failed or skipped: {bad or 'none'}")
    return int(bool(bad))


def run_parts(numbers: list[int], out: Path, only: str, seconds: float) -> int:
    """Run parts one after the other, in `seconds` together. Returns 1 if a job failed.

    `only` is a text that the names of the jobs contain.
    """
    deadline = time.monotonic() + seconds
    failed = False
    for number in numbers:
        jobs = [job for job in PARTS[number] if only in job.name]
        bad = run_part(number, jobs, out, seconds=deadline - time.monotonic())
        print(f"part {number}: failed or skipped: {', '.join(bad) or 'none'}", flush=True)
        failed = failed or bool(bad)
    return int(failed)


def main() -> int:
    """Run the chosen command. Returns 1 if a job failed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for number, jobs in PARTS.items():
        part = commands.add_parser(str(number), help=", ".join(job.name for job in jobs))
        part.add_argument("--only", metavar="TEXT", help="run the jobs whose names contain TEXT")
        part.add_argument(
            "--seconds", type=float, default=PART_SECONDS, help="time limit of the command"
        )
        part.add_argument(
            "--then", type=int, choices=PARTS, metavar="PART", help="a part that follows this one"
        )
    rehearsal = commands.add_parser("rehearsal", help="run every job with tiny sizes on the CPU")
    rehearsal.add_argument("parts", type=int, nargs="*", default=list(PARTS))
    rehearsal.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-rehearsal")
    commands.add_parser("machine", help="print the machine as torch sees it")
    report = commands.add_parser("report", help="write tables and a plot of the measured lines")
    report.add_argument("folder", type=Path, help="folder that contains raw/*.jsonl")
    args = parser.parse_args()
    if args.command == "machine":
        return print_machine()
    if args.command == "rehearsal":
        return rehearse(args.out, args.parts)
    if args.command == "report":
        import gpu_report

        return gpu_report.write(args.folder)
    numbers = [int(args.command), *([args.then] if args.then else [])]
    return run_parts(numbers, find_results_folder(), args.only or "", args.seconds)


if __name__ == "__main__":
    sys.exit(main())
