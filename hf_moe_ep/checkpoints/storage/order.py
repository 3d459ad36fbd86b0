"""Choose the newest of several checkpoints in one folder: by their numbers, not by a clock.

Rank 0 of the next job may run on another machine whose clock is behind. The rules:

1. Folders whose names differ only in a final number (`checkpoint-100`, `checkpoint-200`) are
ordered
   by that number. The Trainer (`checkpoint-100`), Accelerate (`checkpoint_0`) and the examples of
   `save_checkpoint` (`step-100`) use such names.
2. All others are in the order in which they were written. Each manifest has a number for this, one
   more than the highest number in the neighbouring folders.

    step-100 (number 1), step-200 (2), best (3)     the newest is best
    step-100 (number 1), best (2), step-200 (3)     the newest is step-200

Manifests of older versions have no number and count as number 0. Where rule 1 does not order two of
them, the time in the manifest does.
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
    """A checkpoint folder and its position in the order of writing.

    Attributes:
        number: the number in its manifest, 0 without one.
        time: the time in its manifest, in seconds since 1970 by the clock of rank 0.
    """

    folder: Path
    number: int = 0
    time: float = 0.0


def newest_last(saved: Iterable[Saved]) -> list[Path]:
    """Sort the checkpoints of one folder by the rules of this module."""
    series: dict[str, list[tuple[int, Saved]]] = defaultdict(list)
    for one in saved:
        match = _NUMBERED.fullmatch(one.folder.name)
        # A name without a number is a series of its own; "/" keeps its key apart from the others.
        key, step = (match[1], int(match[2])) if match else (f"/{one.folder.name}", 0)
        series[key].append((step, one))
    for of_series in series.values():
        of_series.sort(key=lambda pair: (pair[0], *_written(pair[1])))
    in_order = sorted(series.values(), key=lambda of_series: _written(of_series[-1][1]))
    return [one.folder for of_series in in_order for _, one in of_series]


def _written(one: Saved) -> tuple[int, float, str]:
    """Return the sort key of rule 2; the time counts only for number 0."""
    return one.number, 0.0 if one.number else one.time, one.folder.name
