"""Find and end processes by a mark in their environment, whatever a launcher leaves behind.

torchrun gives each rank a session of its own, so ending the launcher's process group misses them;
a cluster ends everything in a job's cgroup.
"""

import contextlib
import os
import signal
from pathlib import Path

MARK = "HF_MOE_EP_TEST_MARK"


def marked(mark: str) -> list[int]:
    """Find processes that were started with this MARK, their children too."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            # It may end meanwhile.
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> int:
    """Kill them all, until there is none; return how many there were."""
    killed: set[int] = set()
    while alive := [pid for pid in marked(mark) if pid not in killed]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
