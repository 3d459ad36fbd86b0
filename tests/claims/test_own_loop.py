"""examples/rl/own_loop.py: an engine in a process of its own samples from the trained weights.

The checkpoint has a layer for multi-token prediction, which the engine receives in the first sync.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.extra_files import assert_same_bytes, read_files, write_with_extra
from support.scripts import ROOT, run_command

EXAMPLES = ROOT / "examples" / "rl"
STEPS = 4
# Trainer and engine compute in fp32, in other orders.
FP32 = 1e-4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_the_engine_has_the_weights_of_each_step(tmp_path: Path) -> None:
    extra = write_with_extra(tmp_path / "start", "qwen3_next")
    port = str(free_port())
    model = ("--model", str(tmp_path / "start"), "--port", port)
    with open(tmp_path / "engine.txt", "w") as output:
        engine = subprocess.Popen(
            [sys.executable, EXAMPLES / "engine.py", *model], stdout=output, stderr=output
        )
    try:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", str(EXAMPLES / "own_loop.py"), *model]
        command += ["--steps", str(STEPS), "--output_dir", str(tmp_path / "out")]
        path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
        output = tmp_path / "trainer.txt"
        run_command(command, output=output, variables={"PYTHONPATH": path}, timeout=300)
        text = output.read_text()
        assert engine.wait(60) == 0, (tmp_path / "engine.txt").read_text()
    finally:
        engine.kill()
    lines = re.findall(r"step \d: reward \S+, sent (\d+) tensors, .* differ by (\S+)", text)
    assert len(lines) == STEPS, text
    assert all(float(distance) < FP32 for _, distance in lines), lines
    sent = [int(count) for count, _ in lines]
    saved = read_files(tmp_path / "out")
    assert sent[0] == len(saved) and sent[1] <= len(saved) - len(extra)
    assert_same_bytes(saved, extra)
