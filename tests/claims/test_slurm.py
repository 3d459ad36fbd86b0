"""The batch files of examples/slurm/, run unchanged with stand-ins for srun and scontrol.

Two agents with two ranks each stand for two machines. After the death of a rank or an agent, the
job resumes by itself, and every loss equals that of an undisturbed run.
"""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.jobs.going_on import read_losses, steps_taken
from support.scripts import CPU_4, ROOT
from support.slurm import run_sbatch

SLURM = ROOT / "examples" / "slurm"
JOB = ROOT / "tests" / "support" / "jobs" / "going_on.py"
STEPS = 4
WAYS = {"torchrun": [], "accelerate": ["--trainer", "--use_cpu"]}


def _arguments(way: str, folder: Path) -> list[str]:
    return [str(JOB), str(folder), "--steps", str(STEPS), "--patience", "30", *WAYS[way]]


def _losses(folder: Path) -> list[str]:
    """Return the loss of each step. A repeated step must have the same loss."""
    by_step = read_losses(folder)
    assert sorted(by_step) == list(range(STEPS)), by_step
    assert all(len(losses) == 1 for losses in by_step.values()), by_step
    return [min(by_step[number]) for number in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_after_dead_ranks_and_agents_the_job_resumes(tmp_path: Path, way: str) -> None:
    """A rank dies at step 1. Another rank stalls at step 2: at the timeout of the process group, an
    error names it, and torchrun restarts the ranks. An agent dies at step 3: srun ends the other
    agent and starts both again.
    """
    file = SLURM / f"{way}.sbatch"
    outputs = {}
    for name in ("whole", "dying"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "dying":
            (folder / "die-3-1").write_text("rank")
            (folder / "die-2-2").write_text("stall")
            (folder / "die-1-3").write_text("agent")
        code = run_sbatch(file, *_arguments(way, folder), folder=folder, CONFIG=str(CPU_4))
        outputs[name] = (folder / "output").read_text()
        assert code == 0, outputs[name][-6000:]
    assert _losses(tmp_path / "dying") == _losses(tmp_path / "whole")
    # No step was repeated. The losses alone would not show a restart from the beginning.
    assert steps_taken(tmp_path / "dying") == list(range(STEPS))
    assert all((tmp_path / "dying" / f"done-{at}").exists() for at in ("3-1", "2-2", "1-3"))
    assert re.search(r"MoE layer 0 .* could not be exchanged; rank 2 stopped", outputs["dying"])
    assert "start 1 ended with an error" in outputs["dying"], outputs["dying"][-6000:]
    assert "start 2 ended" not in outputs["dying"] and "ended with an error" not in outputs["whole"]


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_requeued_and_resumes(tmp_path: Path) -> None:
    """Slurm sends a signal before the time limit, and the batch file then requeues its job."""
    file = SLURM / "torchrun.sbatch"

    def signal_after_step_2(shell: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("step-2/manifest.json")):
            assert time.monotonic() < deadline and shell.poll() is None
            time.sleep(0.1)
        shell.send_signal(signal.SIGUSR1)

    arguments = [str(JOB), str(tmp_path), "--steps", "100"]
    assert run_sbatch(file, *arguments, folder=tmp_path, meanwhile=signal_after_step_2) == 0
    assert (tmp_path / "requeued").exists()
    before = max(read_losses(tmp_path))
    assert 1 <= before < 99
    arguments = [str(JOB), str(tmp_path), "--steps", str(before + 2)]
    assert run_sbatch(file, *arguments, folder=tmp_path) == 0
    by_step = read_losses(tmp_path)
    assert sorted(by_step) == list(range(before + 2))
    assert steps_taken(tmp_path).count(0) == 1
    assert all(len(losses) == 1 for losses in by_step.values()), by_step
