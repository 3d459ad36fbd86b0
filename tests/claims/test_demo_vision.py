"""`make demo-vision` trains on text and pictures with expert and sequence parallelism.

The demo's own report exits with an error if the reloaded model reads fewer than 80 % of the
held-out digits, or has other losses than the Trainer logged.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_demo_reads_digits() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "examples/run_vision_demo.sh"],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        timeout=900,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    before, after = re.findall(r"digits read right +([\d.]+)% +([\d.]+)%", done.stdout)[0]
    assert float(before) < 20 and float(after) >= 80
    assert (ROOT / "out" / "demo_vision" / "digits.png").stat().st_size > 10_000
