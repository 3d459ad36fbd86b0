"""Run a script in a process, or under `accelerate launch`, with a time limit."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.preloaded import client_here

ROOT = Path(__file__).resolve().parents[2]
CPU_4 = ROOT / "examples" / "accelerate" / "cpu_4.yaml"


def run_script(
    script: Path,
    *arguments: str,
    output: Path,
    config_file: Path | None = None,
    timeout: float = 240.0,
    forked: bool = True,
) -> None:
    """Run a script and write its output to the file `output`.

    After `timeout` seconds all its processes are killed.

    Args:
        forked: each rank is forked from a process that has done the imports (`support.preloaded`),
            which saves it 6 s of CPU time. False: Python starts as on a user's machine.

    Raises:
        AssertionError: the script failed or hung. The message holds the end of its output.
    """
    command = [os.fspath(script), *arguments]
    if forked:
        command = [*client_here(), *command]
    if config_file is not None:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", os.fspath(config_file)]
        options = ["--main_process_port", "0", *(["--no_python"] if forked else [])]
        command = [sys.executable, *launcher, *options, *command]
    elif not forked:
        command = [sys.executable, *command]
    path = os.pathsep.join([os.fspath(ROOT), os.fspath(ROOT / "tests")])
    run_command(command, output=output, variables={"PYTHONPATH": path}, timeout=timeout)


def run_command(
    command: Sequence[str],
    *,
    output: Path,
    variables: Mapping[str, str],
    folder: Path | None = None,
    timeout: float = 240.0,
) -> None:
    """Run any command with more environment variables; see `run_script`.

    Args:
        folder: the working directory; None: that of this process.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(variables)
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=folder,
        )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"none after {timeout:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        text = output.read_text()
        raise AssertionError(f"exit code {code} of {' '.join(command)}:\n{text[-6000:]}")
