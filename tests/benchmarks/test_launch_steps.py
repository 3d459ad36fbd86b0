"""The stub driver refuses what a GPU would refuse, and no launch of the kernels is refused."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from stub_driver import Descriptor, Launch, list_descriptor_problems, list_launch_problems

LAUNCH = {"shared": 200_000, "allowed_shared": 232_448, "cluster": 1}
# 128 x 64 elements of bf16 of a matrix [4096, 2048], with a swizzle of 128 bytes.
DESCRIPTOR = {"type": 9, "rank": 2, "swizzle": 3, "address": 1 << 20}
ARRAYS = {"sizes": [2048, 4096], "strides": [4096], "box": [64, 128], "steps": [1, 1]}

# what is changed: (registers per thread, the problem)
BAD_LAUNCHES: list[tuple[dict[str, Any], int, str]] = [
    ({"block": [2048, 1, 1]}, 16, "2048 threads"),
    ({"block": [512, 1, 1]}, 136, "69632 registers"),
    ({"allowed_shared": 49_152}, 128, "allowed 49152"),
    ({"grid": [0, 1, 1]}, 128, "grid of (0, 1, 1)"),
    ({"grid": [1, 65_536, 1]}, 128, "grid of (1, 65536, 1)"),
    ({"cluster": 16, "grid": [32, 1, 1]}, 128, "clusters of 16"),
    ({"cluster": 2, "grid": [33, 1, 1]}, 128, "clusters of 2"),
]
BAD_DESCRIPTORS: list[tuple[dict[str, Any], str]] = [
    ({"address": 8}, "begins at 0x8"),
    ({"sizes": [2048, 0]}, "sizes of [2048, 0]"),
    ({"strides": [4104]}, "strides of [4104] bytes"),
    ({"strides": [2**40]}, f"strides of [{2**40}] bytes"),
    ({"box": [64, 512]}, "blocks of [64, 512]"),
    ({"box": [128, 128]}, "rows of 256 bytes, more than its swizzle of 128"),
    ({"box": [4, 128], "swizzle": 0}, "rows of 8 bytes, which 16"),
    ({"steps": [1, 9]}, "steps of [1, 9]"),
]


def _fill(structure: ctypes.Structure, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        if isinstance(value, list):
            getattr(structure, name)[: len(value)] = value
        else:
            setattr(structure, name, value)
    return structure


def test_legal_launches_have_no_problems() -> None:
    launch = _fill(Launch(), LAUNCH | {"grid": [70_000, 1, 1], "block": [512, 1, 1]})
    assert list_launch_problems(launch, 128, 0) == []
    assert list_descriptor_problems(_fill(Descriptor(), DESCRIPTOR | ARRAYS)) == []


@pytest.mark.parametrize(("changes", "registers", "problem"), BAD_LAUNCHES)
def test_an_illegal_launch_is_described(
    changes: dict[str, Any], registers: int, problem: str
) -> None:
    values = LAUNCH | {"grid": [70_000, 1, 1], "block": [256, 1, 1]} | changes
    (found,) = list_launch_problems(_fill(Launch(), values), registers, 0)
    assert problem in found


@pytest.mark.parametrize(("changes", "problem"), BAD_DESCRIPTORS)
def test_an_illegal_descriptor_is_described(changes: dict[str, Any], problem: str) -> None:
    found = list_descriptor_problems(_fill(Descriptor(), DESCRIPTOR | ARRAYS | changes))
    assert any(problem in text for text in found), found


# architecture: the cases of compile_kernels.py. All cases on all of them take 20 minutes.
CASES = {
    90: ["qwen3-30b", "gpt-oss-20b", "qwen3-30b chunks r=16", "qwen3-30b nf4 r=16"],
    80: ["qwen3-30b"],
    100: ["qwen3-30b", "qwen3-30b fp8 r=16"],
    120: ["qwen3-30b"],
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", CASES)
@pytest.mark.skipif(shutil.which("cc") is None, reason="the stub driver needs a C compiler")
def test_every_launch_of_a_step_is_legal(arch: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "benchmarks/launch_steps.py", "--arch", str(arch), "--steps", "3"]
    run = subprocess.run(
        [*command, "--only", *CASES[arch]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    *lines, last = run.stdout.splitlines()
    assert run.returncode == 0 and ", 0 problems" in last, run.stdout + run.stderr[-3000:]
    reports = [json.loads(line) for line in lines]
    assert [report["case"] for report in reports] == CASES[arch]
    for report in reports:
        assert report["launches"] >= 13 and report["operator_ms"]["both"] > 0
