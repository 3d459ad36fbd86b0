"""Start the command of `hf-moe-ep run` in an environment that makes its processes patch models.

`hook.py` reads the settings from HF_MOE_EP_* variables in each Python process. Python imports a
module `sitecustomize` from PYTHONPATH when it starts, so PYTHONPATH begins with the folder `path/`:

    hf-moe-ep run --ep-size 8 -- axolotl train cfg.yml
    -> HF_MOE_EP_EP_SIZE=8 PYTHONPATH=.../hf_moe_ep/runner/path axolotl train cfg.yml

The variables alone patch nothing. Python ignores PYTHONPATH if it is started with -I or -E.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_moe_ep.config import environment

# The folder with the file sitecustomize.py.
HOOK_FOLDER = Path(__file__).parent / "path"
_PROGRAM = "hf-moe-ep run"


def make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `variables`, and with the hook in PYTHONPATH."""
    before = environment()
    old_path, hook = before.get("PYTHONPATH", ""), os.fspath(HOOK_FOLDER)
    others = [folder for folder in old_path.split(os.pathsep) if folder != hook] if old_path else []
    return before | dict(variables) | {"PYTHONPATH": os.pathsep.join([hook, *others])}


def run_command(
    command: Sequence[str],
    variables: Mapping[str, str],
    replaced: Sequence[str] = (),
    *,
    dry_run: bool = False,
) -> int:
    """Replace this process by `command`. The function returns only after a dry run.

    Args:
        command: the words of the command.
        variables: the settings, as environment variables.
        replaced: a sentence for each variable of the environment that an option replaces.
        dry_run: print the variables and the command, and do not start it.

    Raises:
        ValueError: no command is given, or no program has its name.
    """
    if not command:
        raise ValueError(
            f"no command is given; write it after the options: {_PROGRAM} --ep-size 8 -- axolotl "
            f"train cfg.yml"
        )
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(
            f"{command[0]} is neither a program in PATH nor an executable file; write the command "
            f"as you would without {_PROGRAM}"
        )
    new = make_environment(variables)
    for sentence in replaced:
        print(f"{_PROGRAM}: {sentence}", file=sys.stderr)
    if not any(map(_may_start_python, [program, *command[1:]])):
        print(
            f"{_PROGRAM}: warning: {command[0]} is no Python program, so nothing is patched, "
            f"unless it starts one",
            file=sys.stderr,
        )
    if dry_run:
        shown = {name: new[name] for name in [*sorted(variables), "PYTHONPATH"]}
        words = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
        print(" ".join([*words, shlex.join(command)]))
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        # Python ignores these signals, and the command would inherit that they are ignored.
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        try:
            os.execve(program, list(command), new)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script without a line "#!". Shells run it by sh, as POSIX says of execvp.
            os.execve("/bin/sh", ["sh", program, *command[1:]], new)
    return 0


def _may_start_python(word: str) -> bool:
    """Return True if a word of a command names Python, a Python file or a script.

    A script is a text file with a first line like "#!/bin/sh". Every script may start Python.
    """
    if Path(word).name.startswith("python") or word.endswith(".py"):
        return True
    path = shutil.which(word)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except PermissionError:
        return False  # not a script, because an interpreter could not read it
