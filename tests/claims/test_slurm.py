"""The batch files of examples/slurm/ run here unchanged, with stand-ins for srun and scontrol.

Two agents with two ranks each stand for two machines. Whatever dies, the job goes on without help,
and every loss is that of an undisturbed run.
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
    """Return the loss of each step. A step that was taken again must have had the same loss."""
    found = read_losses(folder)
    assert sorted(found) == list(range(STEPS)), found
    assert all(len(losses) == 1 for losses in found.values()), found
    return [min(found[number]) for number in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_and_agents_that_die(tmp_path: Path, way: str) -> None:
    """A rank dies at step 1. Another one stalls at step 2; the others name it at the timeout of the
    process group, and torchrun restarts the ranks. An agent dies at step 3: srun ends the others
    and starts again.
    """
    file = SLURM / f"{way}.sbatch"
    said = {}
    for name in ("whole", "dying"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "dying":
            (folder / "die-3-1").write_text("rank")
            (folder / "die-2-2").write_text("stall")
            (folder / "die-1-3").write_text("agent")
        code = run_sbatch(file, *_arguments(way, folder), folder=folder, CONFIG=str(CPU_4))
        said[name] = (folder / "output").read_text()
        assert code == 0, said[name][-6000:]
    assert _losses(tmp_path / "dying") == _losses(tmp_path / "whole")
    # None twice: a run that begins anew has the same losses.
    assert steps_taken(tmp_path / "dying") == list(range(STEPS))
    assert all((tmp_path / "dying" / f"done-{at}").exists() for at in ("3-1", "2-2", "1-3"))
    assert re.search(r"MoE layer 0 .* could not be exchanged; rank 2 stopped", said["dying"])
    assert "start 1 ended with an error" in said["dying"], said["dying"][-6000:]
    assert "start 2 ended" not in said["dying"] and "ended with an error" not in said["whole"]


@pytest.mark.slow
def test_the_end_of_a_jobs_time(tmp_path: Path) -> None:
    """Slurm's signal puts the job back into the queue, and the restarted job goes on."""
    file = SLURM / "torchrun.sbatch"

    def time_is_up(shell: subprocess.Popen[bytes]) -> None:
        patience = time.monotonic() + 300
        while not list(tmp_path.glob("step-2/manifest.json")):
            assert time.monotonic() < patience and shell.poll() is None
            time.sleep(0.1)
        shell.send_signal(signal.SIGUSR1)

    arguments = [str(JOB), str(tmp_path), "--steps", "100"]
    assert run_sbatch(file, *arguments, folder=tmp_path, meanwhile=time_is_up) == 0
    assert (tmp_path / "requeued").exists()
    before = max(read_losses(tmp_path))
    assert 1 <= before < 99
    arguments = [str(JOB), str(tmp_path), "--steps", str(before + 2)]
    assert run_sbatch(file, *arguments, folder=tmp_path) == 0
    found = read_losses(tmp_path)
    assert sorted(found) == list(range(before + 2))
    assert steps_taken(tmp_path).count(0) == 1
    assert all(len(losses) == 1 for losses in found.values()), found
