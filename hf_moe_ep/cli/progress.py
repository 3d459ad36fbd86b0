"""Progress lines of long commands, on stderr, whether it is a terminal or a log file.

A bar that redraws itself is unreadable in a log file, so each finished item gets a line. Short
commands stay silent: nothing is printed in the first two seconds. TQDM_DISABLE=1 turns it off.
"""

from __future__ import annotations

import os
import sys
import time

_SILENT_SECONDS = 2.0


class Progress:
    """Counts finished items, and prints a line for each after the first two seconds."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.count = 0
        self.began = time.monotonic()
        # tqdm's own variable; tqdm treats every value but these as true.
        self.shown = os.environ.get("TQDM_DISABLE", "") in ("", "0")

    def finished(self, what: object) -> None:
        """Count one item; `what` describes it in the line."""
        self.count += 1
        seconds = time.monotonic() - self.began
        if self.shown and seconds >= _SILENT_SECONDS:
            line = f"{self.unit} {self.count}, {seconds:.0f} s: {what}"
            print(line, file=sys.stderr, flush=True)
