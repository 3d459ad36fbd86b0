"""`Progress` prints one line to stderr for each item that a long command has finished.

A progress bar that redraws itself would be unreadable in a log file. Nothing is printed in the
first two seconds, so short commands stay silent. TQDM_DISABLE=1 turns the lines off.
"""

from __future__ import annotations

import os
import sys
import time

_SILENT_SECONDS = 2.0


class Progress:
    """Counts finished items and, after the first two seconds, prints a line for each of them."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.count = 0
        self.started_at = time.monotonic()
        # The variable belongs to tqdm. tqdm's current version reads "0" as true; here "0" is false.
        self.shown = os.environ.get("TQDM_DISABLE", "") in ("", "0")

    def finished(self, item: object) -> None:
        """Count one more finished item, and print its description."""
        self.count += 1
        seconds = time.monotonic() - self.started_at
        if self.shown and seconds >= _SILENT_SECONDS:
            line = f"{self.unit} {self.count}, {seconds:.0f} s: {item}"
            print(line, file=sys.stderr, flush=True)
