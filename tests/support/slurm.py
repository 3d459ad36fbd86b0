"""A fake of the parts of Slurm that the files of examples/slurm/ use, on one machine.

`run_sbatch` runs a batch file as Slurm does on the first of N machines, with fakes of `srun` and
`scontrol` on PATH. `srun` starts the command N times, as N tasks. If a task fails, it kills the
others and all processes that they started. `scontrol` prints the host names. For `requeue` it ends
the step, as Slurm does before it starts the job again. With `network`, each task runs on a node of
`support.namespaces`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, os.fspath(Path(__file__).parents[1]))

from support.marked import MARK, kill_marked
from support.namespaces import INTERFACES, Nodes
from support.scripts import ROOT

CPUS = 2
OPTIONS = ["--ntasks-per-node=1", f"--cpus-per-task={CPUS}", "--kill-on-bad-exit=1"]
HOSTS = "nodes[0-1]"


def run_sbatch(
    file: Path,
    *arguments: str,
    folder: Path,
    nodes: int = 2,
    gpus: int = 2,
    timeout: float = 400.0,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda shell: None,
    network: Nodes | None = None,
    **environment: str,
) -> int:
    """Run a batch file, write its output to `folder`/output, and return its exit code.

    `meanwhile` is called after the start; when it returns, the end of the batch file is awaited.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name in ("srun", "scontrol"):
        script = f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n'
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    # The number of a free port is the job's id, so that jobs of other tests have other ids.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = free.getsockname()[1]
    mark = f"slurm-{os.getpid()}-{job}"
    variables = {
        "PATH": os.pathsep.join(
            [os.fspath(commands), os.fspath(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": os.pathsep.join([os.fspath(ROOT), os.fspath(ROOT / "tests")]),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": HOSTS,
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_CPUS_ON_NODE": str(CPUS),
        "SLURM_FOLDER": os.fspath(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SLURM_PREFIXES": json.dumps([[] for _ in range(nodes)]),
        "SLURM_HOSTS": "\n".join(["127.0.0.1"] * nodes),
        MARK: mark,
    }
    if network is not None:
        variables["SLURM_PREFIXES"] = json.dumps([network.prefix(node) for node in range(nodes)])
        variables["SLURM_HOSTS"] = "\n".join(f"node{node}" for node in range(nodes))
        variables |= INTERFACES
    with open(folder / "output", "ab") as output:
        shell = subprocess.Popen(
            ["bash", os.fspath(file), *arguments],
            env=os.environ | variables | environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            meanwhile(shell)
            return shell.wait(timeout)
        finally:
            shell.kill()
            shell.wait()
            kill_marked(mark)


def srun(arguments: list[str]) -> NoReturn:
    """Run the tasks of a step. If a task fails, all are killed."""
    assert arguments[: len(OPTIONS)] == OPTIONS, arguments
    # The tasks get another mark than the shell and this process, which must not be killed.
    mark = f"{os.environ[MARK]}-{os.getpid()}"
    Path(os.environ["SLURM_FOLDER"], "step").write_text(mark)

    def end(code: int) -> NoReturn:
        kill_marked(mark)
        os._exit(code)

    signal.signal(signal.SIGTERM, lambda *_: end(143))
    tasks = [
        subprocess.Popen(
            [*prefix, *arguments[len(OPTIONS) :]],
            env=os.environ | {"SLURM_NODEID": str(node), MARK: mark},
        )
        for node, prefix in enumerate(json.loads(os.environ["SLURM_PREFIXES"]))
    ]
    while True:
        codes = [task.poll() for task in tasks]
        if any(codes):
            end(1)
        if None not in codes:
            end(0)
        time.sleep(0.1)


def scontrol(arguments: list[str]) -> None:
    """Print the host names, or requeue the job."""
    if arguments == ["show", "hostnames", HOSTS]:
        print(os.environ["SLURM_HOSTS"])
        return
    assert arguments == ["requeue", os.environ["SLURM_JOB_ID"]], arguments
    folder = Path(os.environ["SLURM_FOLDER"])
    (folder / "requeued").touch()
    kill_marked((folder / "step").read_text())


if __name__ == "__main__":
    {"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:])
