"""Every Triton kernel, compiled ahead of time for A100 and H100 with each row of the block table.

A usual run compiles one variant of every kernel for each GPU, a full run (slow) all of them.

A kernel that spills registers or wants more shared memory than there is fails here, on a machine
without a GPU, instead of being slow or not starting at all on a user's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

KERNELS = {
    "up_kernel",
    "grouped_mm_kernel",
    "dgated_kernel",
    "outer_kernel",
    "combine_kernel",
    "weight_grads_kernel",
    "segment_sum_kernel",
    "_count_kernel",
    "_scan_kernel",
    "_place_kernel",
    "_tiles_kernel",
}
PRODUCTS = {"up_kernel", "grouped_mm_kernel", "dgated_kernel", "outer_kernel"}
# Bytes of shared memory a block may have: sm_80 rows also serve sm_86 and sm_89, which have less.
SHARED_LIMIT = {80: 101376, 90: 232448}
# What the compiler of Triton 3.6 needs more registers for than the one of 3.9.
SPILLS_OF_3_6 = {
    ("gpt-oss-20b", 90, "dgated_kernel"),
    ("gpt-oss-20b r=16", 90, "dgated_kernel"),
}


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def reports(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """In a process of its own: under TRITON_INTERPRET there is nothing to compile."""
    script = Path(__file__).with_name("compile_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(script.parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), f"--{request.param}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_spills(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == KERNELS
    assert {report["arch"] for report in reports} == {80, 90}
    spilled = {(r["case"], r["arch"], r["kernel"]) for r in reports if r["spilled"]}
    assert spilled <= (SPILLS_OF_3_6 if triton.__version__.startswith("3.6") else set())


def test_shared_memory_suffices(reports: list[dict[str, Any]]) -> None:
    assert [r for r in reports if r["shared"] > SHARED_LIMIT[r["arch"]]] == []


def test_products_run_on_the_tensor_cores(reports: list[dict[str, Any]]) -> None:
    """wgmma on sm_90, mma.sync on sm_80; fp32 asks for exact products, which have neither."""
    products = [r for r in reports if r["dots"] and "fp32" not in r["case"]]
    for arch in (80, 90):
        assert {r["kernel"] for r in products if r["arch"] == arch} == PRODUCTS
    assert [r for r in products if r["arch"] == 90 and not r["wgmma"]] == []
    assert [r for r in products if r["arch"] == 80 and not r["mma"]] == []
