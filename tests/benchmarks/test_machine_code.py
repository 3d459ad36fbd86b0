"""benchmarks/machine_code.py finds how far the loops of a compiled kernel prefetch."""

import json
import os
import subprocess
import sys

import pytest
from block_candidates import CANDIDATES
from machine_code import Loop, product_loops
from support.scripts import ROOT

from hf_moe_ep.ops.kernels.blocks import TABLE

PRODUCTS = ["WARPGROUP.ARRIVE", "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16], R24, gsb0"]
ONE_UNFINISHED = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
BARRIER = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR10+0x30000], R4"
GROUP = ["LDGSTS.E.BYPASS.128 [R9+0x20000], desc[UR30][R4.64], !P1", "LDGDEPBAR"]
TMA = "UTMALDG.3D [UR8], [UR6]"


def _wait(unfinished_groups: int) -> str:
    return f"DEPBAR.LE SB0, 0x{unfinished_groups:x}"


def _list_code(loop: list[str]) -> str:
    """Write a kernel as cuobjdump does: loads before the loop, the loop, and a wait after it."""
    first = 0x1490
    code = [*GROUP, *GROUP, *loop, f"@!P2 BRA 0x{first:x}", ONE_UNFINISHED[:-1] + "0", _wait(0)]
    start = first - 16 * 2 * len(GROUP)
    return "".join(f"        /*{start + 16 * i:04x}*/    {x} ;\n" for i, x in enumerate(code))


# name: (the instructions of a step, the steps ahead)
LOOPS: dict[str, tuple[list[str], int | None]] = {
    "two groups per step": ([_wait(2), *PRODUCTS, ONE_UNFINISHED, *GROUP, *GROUP], 1),
    "one group per step": ([_wait(2), *PRODUCTS, ONE_UNFINISHED, *GROUP], 2),
    "waits for its own loads": ([*GROUP, _wait(0), *PRODUCTS, ONE_UNFINISHED], 0),
    "TMA for both factors": ([BARRIER, *PRODUCTS, ONE_UNFINISHED, TMA, TMA], None),
    "TMA for one": ([_wait(2), BARRIER, *PRODUCTS, ONE_UNFINISHED, *GROUP, TMA], 2),
    "TMA for one, waits for the other": (
        [*GROUP, _wait(0), BARRIER, *PRODUCTS, ONE_UNFINISHED, TMA],
        0,
    ),
    "TMA for one, the other through registers": (
        ["LDG.E.128 R4, desc[UR30][R4.64]", BARRIER, *PRODUCTS, ONE_UNFINISHED, TMA],
        0,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_prefetches_as_far_as_its_own_waits_allow(name: str) -> None:
    step, steps_ahead = LOOPS[name]
    loads = sum(text.startswith(("LDGSTS", "UTMALDG")) for text in step)
    want = Loop(len(step) + 1, 1, loads, steps_ahead, serial=False, spills=0)
    assert product_loops(_list_code(step)) == [want]


LIST_CANDIDATES = """
import json
from compile_kernels import list_candidate_jobs
print(json.dumps(sorted({job.candidate for job in list_candidate_jobs()})))
"""


@pytest.mark.slow
def test_candidates_for_all_rows_of_the_table_are_compiled() -> None:
    """A candidate is not compiled if the row of its case has the same block."""
    result = subprocess.run(
        [sys.executable, "-c", LIST_CANDIDATES],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        check=True,
    )
    compiled = [CANDIDATES[number] for number in json.loads(result.stdout)]
    assert {candidate.row for candidate in compiled} == {candidate.row for candidate in CANDIDATES}
    # The cases use the row "some", which has another block for `outer` than the row "many".
    own = next(x for x in CANDIDATES if x.block == TABLE[x.row].outer and x.row[2] == "many")
    assert own in compiled
