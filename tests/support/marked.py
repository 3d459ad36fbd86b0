"""Find and kill processes by a mark in their environment.

torchrun starts each rank in a session of its own, so killing the launcher's process group does not
kill the ranks. A cluster kills all processes in the cgroup of a job; the mark replaces the cgroup.
"""

import contextlib
import os
import signal
from pathlib import Path

MARK = "TEST_MARK_OF_HF_MOE_EP"


def marked(mark: str) -> list[int]:
    """Return the ids of all other processes that were started with this MARK, with children."""
    variable, pids = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process may have ended
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
    return pids


def kill_marked(mark: str) -> int:
    """Kill the marked processes until there are none, and return their number."""
    killed: set[int] = set()
    while alive := [pid for pid in marked(mark) if pid not in killed]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
