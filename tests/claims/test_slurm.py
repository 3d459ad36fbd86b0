"""The unchanged batch files of examples/slurm/ resume their jobs after failures.

The tests replace srun and scontrol. Two agents with two ranks each represent two machines. After
the death of a rank or an agent, the job resumes by itself, and every loss equals the loss of an
undisturbed run. stages.sbatch runs on two network namespaces with a slow link between them.
"""

import json
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from support.jobs.going_on import read_losses, steps_taken
from support.namespaces import Nodes, skip_without_namespaces
from support.scripts import CPU_4, ROOT, run_script
from support.slurm import run_sbatch
from support.tiny_models import tiny

SLURM = ROOT / "examples" / "slurm"
JOB = ROOT / "tests" / "support" / "jobs" / "going_on.py"
STAGES = ROOT / "examples" / "accelerate" / "gpu_2x8_stages.yaml"
STEPS = 4
TWO_LAYERS = ["--layers", "2", "--ep_size", "2"]
LAUNCHERS = {"torchrun": [], "accelerate": ["--trainer", "--use_cpu"]}


def _list_arguments(launcher: str, folder: Path) -> list[str]:
    return [str(JOB), str(folder), "--steps", str(STEPS), "--patience", "30", *LAUNCHERS[launcher]]


def _read_losses(folder: Path) -> list[str]:
    """Return the loss of each step. A repeated step must have the same loss."""
    by_step = read_losses(folder)
    assert sorted(by_step) == list(range(STEPS)), by_step
    assert all(len(losses) == 1 for losses in by_step.values()), by_step
    return [min(by_step[number]) for number in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_after_dead_ranks_and_agents_the_job_resumes(tmp_path: Path, launcher: str) -> None:
    """A rank dies at step 1. Another rank stalls at step 2: at the timeout of the process group an
    error names this rank, and torchrun restarts the ranks. An agent dies at step 3: srun ends the
    other agent and starts both again.
    """
    file = SLURM / f"{launcher}.sbatch"
    outputs = {}
    for name in ("whole", "dying"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "dying":
            (folder / "die-3-1").write_text("rank")
            (folder / "die-2-2").write_text("stall")
            (folder / "die-1-3").write_text("agent")
        code = run_sbatch(
            file, *_list_arguments(launcher, folder), folder=folder, CONFIG=str(CPU_4)
        )
        outputs[name] = (folder / "output").read_text()
        assert code == 0, outputs[name][-6000:]
    assert _read_losses(tmp_path / "dying") == _read_losses(tmp_path / "whole")
    # No step was repeated. The losses alone would not show a restart from the beginning.
    assert steps_taken(tmp_path / "dying") == list(range(STEPS))
    assert all((tmp_path / "dying" / f"done-{at}").exists() for at in ("3-1", "2-2", "1-3"))
    assert re.search(r"MoE layer 0 .* could not be exchanged; rank 2 stopped", outputs["dying"])
    assert "start 1 ended with an error" in outputs["dying"], outputs["dying"][-6000:]
    assert "start 2 ended" not in outputs["dying"] and "ended with an error" not in outputs["whole"]


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_requeued_and_resumes(tmp_path: Path) -> None:
    """Slurm sends a signal before the time limit. Then the batch file requeues its job."""
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


@pytest.mark.slow
def test_a_stock_script_is_patched_by_the_runner(tmp_path: Path) -> None:
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "model")
    script = ROOT / "tests" / "support" / "jobs" / "unpatched.py"
    runner = ["-m", "hf_moe_ep.run", "--ep-size", "2", str(script)]
    options = ["--model", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    options += ["--max_steps", "2", "--report_to", "none", "--use_cpu"]
    file = SLURM / "accelerate.sbatch"
    code = run_sbatch(file, *runner, *options, folder=tmp_path, CONFIG=str(CPU_4))
    output = (tmp_path / "output").read_text()
    assert code == 0, output[-6000:]
    assert output.count("hf-moe-ep run: patched Qwen3MoeForCausalLM (--ep-size 2)") == 1
    assert "layout     4 ranks = dp_replicate 1 x ep_fsdp 2 x ep 2" in output
    assert list((tmp_path / "out").glob("*.safetensors"))


def _run_stages(folder: Path, network: Nodes, failures: Sequence[str] = ()) -> int:
    """Run stages.sbatch with the Trainer, and return the bytes that both nodes sent."""
    config = yaml.safe_load(STAGES.read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    config |= {"use_cpu": True, "mixed_precision": "no"}
    folder.mkdir()
    for failure in failures:
        (folder / failure).write_text("rank")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    before = sum(network.sent(node) for node in range(2))
    code = run_sbatch(
        SLURM / "stages.sbatch",
        *[*_list_arguments("accelerate", folder), *TWO_LAYERS],
        folder=folder,
        network=network,
        CONFIG=str(file),
        MICRO_BATCHES="4",
    )
    output = (folder / "output").read_text()
    assert code == 0, output[-6000:]
    assert "stage 0: node0\nstage 1: node1\n" in output
    layout = json.loads((folder / f"checkpoint-{STEPS}" / "manifest.json").read_text())["layout"]
    assert (layout["world_size"], layout["pp_size"], layout["ep_size"]) == (4, 2, 2)
    return sum(network.sent(node) for node in range(2)) - before


@pytest.mark.slow
def test_stages_on_a_slow_link_resume_after_a_death(tmp_path: Path) -> None:
    """Each node is a stage with ep 2. The losses equal one machine's without stages.

    A rank of the second stage dies at step 1, and srun starts all ranks again.
    """
    skip_without_namespaces()
    whole, dying, alone = (tmp_path / name for name in ("whole", "dying", "alone"))
    with Nodes(2, rate="100mbit") as network:
        sent = _run_stages(whole, network)
        _run_stages(dying, network, ["die-3-1"])
    alone.mkdir()
    # Four data ranks instead of two have the same rows.
    rows = ["--per_device_train_batch_size", "4"]
    arguments = [*_list_arguments("accelerate", alone)[1:], *TWO_LAYERS, *rows]
    run_script(JOB, *arguments, output=tmp_path / "alone.txt", config_file=CPU_4)
    assert _read_losses(dying) == _read_losses(whole)
    assert (dying / "done-3-1").exists() and steps_taken(dying).count(0) == 1
    assert "start 1 ended with an error" in (dying / "output").read_text()
    for got, want in zip(_read_losses(whole), _read_losses(alone), strict=True):
        assert abs(float(got) - float(want)) <= 2e-4, (got, want)  # fp32, in another order
    print(f"{sent / STEPS / 2**10:.0f} KiB per step crossed the link; losses {_read_losses(whole)}")
