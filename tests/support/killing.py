"""Kill the current process with SIGKILL some seconds after a call."""

import os
import signal
import time


def kill_later(seconds: float) -> None:
    """Start a child process that kills this process after some seconds."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)
