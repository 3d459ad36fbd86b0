"""Every Triton kernel, compiled ahead of time for A100 and H100 with each row of the block table.

All of this is slow. `compile_kernels.py --some` compiles one variant of every kernel for each GPU.

What is slow on a GPU, or does not start there, fails here, on a machine without one: registers
that spill, more shared memory than there is, loops that wait for their own loads, products that
wait for each other, and loops or registers that have grown since they were last recorded
(`ahead_of_time.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ahead_of_time import figures, recorded, version
from machine_code import Loop, product_loops

from hf_moe_ep.ops.kernels.blocks import CANDIDATES

KERNELS = {
    "up_kernel",
    "grouped_mm_kernel",
    "dgated_kernel",
    "outer_kernel",
    "bias_dots_kernel",
    "combine_kernel",
    "weight_grads_kernel",
    "segment_sum_kernel",
    "_count_kernel",
    "_scan_kernel",
    "_place_kernel",
    "_tiles_kernel",
}
PRODUCTS = {"up_kernel", "grouped_mm_kernel", "dgated_kernel", "outer_kernel"}
# Bytes of shared memory a block may have: sm_80 rows also serve sm_86, sm_89 and sm_120, which
# have less than an A100.
SHARED_LIMIT = {80: 101376, 90: 232448, 120: 101376}
# Bytes that a thread of a kernel may keep in memory for want of registers: of most one address. The
# epilogue of `dgated` holds a gate, an up, their gradients and a routing weight at once.
SPILL_BUDGET = dict.fromkeys(KERNELS, 8) | {"dgated_kernel": 64}
# Rows of an adapter of rank 4 are 8 bytes long: nothing of this loop is copied ahead on sm_80.
NOT_AHEAD = {("odd sizes r=4 few rows", 80, "outer_kernel")}
# How much longer than recorded a step of a loop may get.
MOST_GROWTH = 1.1


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    found = _compile("--all")
    assert {report["kernel"] for report in found} == KERNELS
    assert {report["arch"] for report in found} >= {80, 90}
    return found


@pytest.fixture(scope="module")
def candidates() -> list[dict[str, Any]]:
    return _compile("--candidates")


def _compile(what: str) -> list[dict[str, Any]]:
    """In a process of its own: under TRITON_INTERPRET there is nothing to compile."""
    script = Path(__file__).with_name("compile_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(script.parents[2]), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), what],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_spills_more_than_its_budget(reports: list[dict[str, Any]]) -> None:
    over = [r for r in reports if r["spilled"] > SPILL_BUDGET[r["kernel"]]]
    assert _named(over, "spilled") == []


def test_no_step_of_a_loop_spills_more_than_an_address(reports: list[dict[str, Any]]) -> None:
    """But for one address, a thread fetches what it keeps in memory outside of the loop."""
    spilling = [r for r in reports if any(loop["spills"] > 2 for loop in r["loops"])]
    assert _named(spilling, "loops") == []


def test_shared_memory_suffices(reports: list[dict[str, Any]]) -> None:
    over = [r for r in reports if r["shared"] > SHARED_LIMIT[r["arch"]]]
    assert _named(over, "shared") == []


def test_products_run_on_the_tensor_cores(reports: list[dict[str, Any]]) -> None:
    """wgmma on sm_90, mma.sync on sm_80; fp32 asks for exact products, which have neither."""
    products = [r for r in reports if r["dots"] and "fp32" not in r["case"]]
    for arch in (80, 90):
        assert {r["kernel"] for r in products if r["arch"] == arch} == PRODUCTS
    assert [r for r in products if r["arch"] == 90 and not r["wgmma"]] == []
    assert [r for r in products if r["arch"] != 90 and not r["mma"]] == []


def test_loads_run_ahead_of_the_products(reports: list[dict[str, Any]]) -> None:
    """A loop of several stages has loads of later steps under way while it computes."""
    staged = [r for r in reports if r["dots"] and r["stages"] > 1]
    assert {r["kernel"] for r in staged} == PRODUCTS  # nothing is left out
    assert _named([r for r in staged if not r["loops"]], "loops") == []
    waiting = [
        r
        for r in staged
        if any(loop["steps_ahead"] == 0 for loop in r["loops"])
        and (r["case"], r["arch"], r["kernel"]) not in NOT_AHEAD
    ]
    assert _named(waiting, "loops") == []


def test_products_do_not_wait_for_each_other(reports: list[dict[str, Any]]) -> None:
    serial = [r for r in reports if any(loop["serial"] for loop in r["loops"])]
    assert _named(serial, "loops") == []


def test_kernels_are_no_larger_than_recorded(reports: list[dict[str, Any]]) -> None:
    """Instructions of a step, and programs that share a multiprocessor."""
    on_file = recorded()
    if not any(key[0] == version() for key in on_file):
        pytest.skip(f"nothing is recorded for Triton {version()}")
    grown = []
    for report in reports:
        key = version(), report["arch"], report["names"][0]
        assert key in on_file, f"not recorded: {key}"
        was = on_file[key]["now"]
        now = figures(report)
        longer = (now["instructions"] or 0) > MOST_GROWTH * (was["instructions"] or 0)
        if longer or now["programs"] < was["programs"]:
            grown.append((report["names"][0], report["arch"], was, now))
    assert grown == [], "if it must be: python tests/ops/compile_kernels.py --write"


@pytest.mark.slow
def test_candidates_of_the_table_compile_within_its_limits(
    candidates: list[dict[str, Any]],
) -> None:
    """A sweep on a GPU times only loops that neither spill nor wait for their loads or products.

    Behind the loop, once per tile, a candidate may spill: two programs per multiprocessor or wider
    tiles may be worth more.
    """
    assert {r["candidate"] for r in candidates} == set(range(len(CANDIDATES)))
    for check in (
        test_no_step_of_a_loop_spills_more_than_an_address,
        test_shared_memory_suffices,
        test_loads_run_ahead_of_the_products,
        test_products_do_not_wait_for_each_other,
    ):
        check(candidates)


def _named(reports: list[dict[str, Any]], figure: str) -> list[tuple[str, int, Any]]:
    return [(r["names"][0], r["arch"], r[figure]) for r in reports]


def test_a_loop_that_waits_for_its_loads_and_its_products_is_seen() -> None:
    """The reader of machine code, on two loops by hand: one step ahead, and none."""
    good = _listing(
        "DEPBAR.LE SB0, 0x2",
        "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24",
        "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "@P1 LDGSTS.E.BYPASS.128 [R5], desc[UR4][R8.64]",
        "LDGDEPBAR",
        "LDGSTS.E.BYPASS.128 [R6], desc[UR4][R8.64]",
        "LDGDEPBAR",
        "@!P0 BRA 0x0020",
    )
    bad = _listing(
        "DEPBAR.LE SB0, 0x0",
        "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "@!P1 LDL.LU R9, [R1+0x4]",
        "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R8.64]",
        "LDGDEPBAR",
        "@P0 BRA 0x0020",
    )
    assert product_loops(good) == [Loop(9, 2, 2, steps_ahead=1, serial=False, spills=0)]
    assert product_loops(bad) == [Loop(9, 2, 1, steps_ahead=0, serial=True, spills=1)]
    assert product_loops(_listing("BRA 0x0000", "BRA 0x0040")) == []


def _listing(*loop: str) -> str:
    """A listing as cuobjdump prints it: two instructions, then those of a loop."""
    code = ("MOV R1, c[0x0][0x28]", "S2R R0, SR_TID.X", *loop, "EXIT")
    return "".join(
        f"        /*{16 * i:04x}*/    {text} ;   /* 0x0 */\n" for i, text in enumerate(code)
    )
