"""Wait a moment when the interpreter exits, so that a finished run exits with code 0.

Gloo runs a collective in its own thread, which may release the tensors a moment after the caller
has continued. The thread needs the GIL to free the last reference. If the interpreter is already
shutting down, the thread is stopped inside a destructor. The process then prints "terminate called
without an active exception" and aborts (SIGABRT), and the launcher reports a failed run. Stock
torch has the same race after the last collective of a run:
https://github.com/pytorch/pytorch/pull/179291 (closed, not merged), issue 190489.
"""

import atexit
import time

# The threads need only a small part of this time, even on a busy machine.
_SECONDS = 0.1


def let_threads_finish() -> None:
    """Register a short sleep, which releases the GIL, for the exit of the interpreter."""
    atexit.unregister(_sleep)  # the function that is registered last runs first at exit
    atexit.register(_sleep)


def _sleep() -> None:
    time.sleep(_SECONDS)
