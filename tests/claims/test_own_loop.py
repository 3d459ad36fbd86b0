"""In examples/rl an engine in its own process samples from the trained weights.

The checkpoint of own_loop.py has a layer for multi-token prediction, which the engine receives in
the first sync. In trl_grpo.py, TRL's own code sends the weights.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.extra_files import assert_same_bytes, read_files, write_with_extra
from support.scripts import CPU_4, ROOT, run_command, run_script

EXAMPLES = ROOT / "examples" / "rl"
STEPS = 4
# The trainer and the engine add in fp32 in different orders.
FP32 = 1e-4


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_engine(model: Path, output: Path) -> Iterator[str]:
    """Run the engine in the block, and yield its port. The trainer must stop it."""
    port = str(find_free_port())
    command = [sys.executable, EXAMPLES / "engine.py", "--model", model, "--port", port]
    with open(output, "w") as file:
        engine = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield port
        assert engine.wait(60) == 0, output.read_text()
    finally:
        engine.kill()


@pytest.mark.slow
def test_the_engine_has_the_weights_of_each_step(tmp_path: Path) -> None:
    start, output = tmp_path / "start", tmp_path / "trainer.txt"
    extra = write_with_extra(start, "qwen3_next")
    with run_engine(start, tmp_path / "engine.txt") as port:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", str(EXAMPLES / "own_loop.py"), "--port", port]
        command += ["--model", str(start), "--steps", str(STEPS)]
        command += ["--output_dir", str(tmp_path / "out")]
        path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
        run_command(command, output=output, variables={"PYTHONPATH": path}, timeout=300)
    text = output.read_text()
    lines = re.findall(r"step \d: reward \S+, sent (\d+) tensors, .* differ by (\S+)", text)
    assert len(lines) == STEPS, text
    assert all(float(distance) < FP32 for _, distance in lines), lines
    sent = [int(count) for count, _ in lines]
    saved = read_files(tmp_path / "out")
    assert sent[0] == len(saved) and sent[1] <= len(saved) - len(extra)
    assert_same_bytes(saved, extra)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "LoRA"])
def test_trl_sends_the_weights_of_each_step(kind: str, tmp_path: Path) -> None:
    """The trainer logs its distance from the engine's log-probabilities."""
    pytest.importorskip("trl", minversion="1.16")
    start, folder = tmp_path / "start", tmp_path / "out"
    subprocess.run([sys.executable, EXAMPLES.parent / "make_small_model.py", start], check=True)
    flags = "--ep_size 2 --use_cpu --bf16 False --learning_rate 3e-3 --logging_steps 1"
    flags += " --lr_scheduler_type constant --num_generations 4 --max_completion_length 6"
    flags += " --per_device_train_batch_size 4 --report_to none --disable_tqdm True"
    flags += f" --save_strategy no --max_steps {STEPS}" + " --lora" * (kind == "LoRA")
    with run_engine(start, tmp_path / "engine.txt") as port:
        run_script(
            EXAMPLES / "trl_grpo.py",
            *["--model", str(start), "--output_dir", str(folder), "--vllm_server_port", port],
            *flags.split(),
            output=tmp_path / "trainer.txt",
            config_file=CPU_4,
            timeout=400,
            forked=False,
        )
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    name = "sampling/sampling_logp_difference/max"
    distances = [entry[name] for entry in log if name in entry]
    print(distances)
    assert len(distances) == STEPS and max(distances) < FP32, distances
    assert any(entry.get("grad_norm", 0) > 0 for entry in log)
