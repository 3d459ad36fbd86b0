"""What a finished run waits for, so that it ends with code 0.

Gloo runs a collective in a thread of its own, which may let go of the tensors a moment after the
caller went on. Where it holds the last reference it needs Python's lock, and a thread that asks
for the lock of an interpreter that is ending is stopped in the middle of a destructor: "terminate
called without an active exception", SIGABRT, and the launcher calls a finished run a failed one.
Stock torch has it too, now and then, after any last collective.
Sources: https://github.com/pytorch/pytorch/pull/179291 (closed, not merged), issue 190489.
"""

import atexit
import time

# Seconds, many times what the threads need even on a busy machine.
_GRACE = 0.1


def let_threads_finish() -> None:
    """At the interpreter's end, before it stops threads, give Python's lock away for a moment."""
    atexit.unregister(_give_way)  # once, and before whatever was registered earlier
    atexit.register(_give_way)


def _give_way() -> None:
    time.sleep(_GRACE)
