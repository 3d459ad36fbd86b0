"""`make demo` trains as one stock process does.

The demo's own report exits with an error if the held-out loss is not below that of a bigram model,
if the reloaded checkpoint has another loss than the Trainer logged, if one of the first 20 losses
differs from stock's by more than 1e-4, or if the last held-out loss differs by more than 2 %.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_demo_equals_one_stock_process() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "examples/run_demo.sh", "--check"],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        timeout=1500,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "bigram" in done.stdout
    for picture in ("loss.png", "expert_load.png"):
        assert next((ROOT / "out" / "demo").rglob(picture)).stat().st_size > 10_000
