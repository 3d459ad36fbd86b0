"""Which of several checkpoints in one folder is the newest: by steps, never by a clock.

Rank 0 of the next job may run on another machine, whose clock is behind. So:

1. Folders that are named alike and end in a number (`checkpoint-100`, `checkpoint-200`) are in the
   order of their numbers. That holds for the Trainer's names, for Accelerate's (`checkpoint_0`)
   and for those of `save_checkpoint` (`step-100`).
2. Everything else is in the order in which it was written. Each manifest has a number for that,
   which is one more than the highest among the folders beside it.

    step-100 (number 1), step-200 (2), best (3)     the newest is best
    step-100 (number 1), best (2), step-200 (3)     the newest is step-200

Manifests that were written before there were such numbers count as number 0. Between two of them
that rule 1 does not order nothing is left but the time that they hold.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NUMBERED = re.compile(r"([A-Za-z][A-Za-z_-]*?[-_]?)(\d+)")


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what its manifest says of the order.

    Attributes:
        number: one more than that of any checkpoint that was beside it; 0 where there is none.
        time: seconds since 1970 by the clock of rank 0.
    """

    folder: Path
    number: int = 0
    time: float = 0.0


def newest_last(saved: Iterable[Saved]) -> list[Path]:
    """Sort checkpoints of one folder by the rules of this module."""
    series: dict[str, list[tuple[int, Saved]]] = defaultdict(list)
    for one in saved:
        match = _NUMBERED.fullmatch(one.folder.name)
        # A name without a number is a series of its own. No series of numbers is called so.
        key, step = (match[1], int(match[2])) if match else (f"/{one.folder.name}", 0)
        series[key].append((step, one))
    for of_series in series.values():
        of_series.sort(key=lambda pair: (pair[0], *_written(pair[1])))
    in_order = sorted(series.values(), key=lambda of_series: _written(of_series[-1][1]))
    return [one.folder for of_series in in_order for _, one in of_series]


def _written(one: Saved) -> tuple[int, float, str]:
    """The order of writing: by number. Only those of number 0 differ in nothing but their time."""
    return one.number, 0.0 if one.number else one.time, one.folder.name
