"""SIGKILL from outside, at a moment that the victim does not know."""

import os
import signal
import time


def kill_later(seconds: float) -> None:
    """Kill this process in so many seconds, whatever it does then."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
