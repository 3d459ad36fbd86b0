"""Order the checkpoints of one folder by their numbers, not by a clock.

A clock is not reliable: rank 0 of the next job may run on another machine whose clock is behind.
`sort_newest_last` follows two rules:

1. Folders whose names differ only in a final number are ordered by that number. The Trainer
   (`checkpoint-100`), Accelerate (`checkpoint_0`) and the examples of `save_checkpoint`
   (`step-100`) use such names.
2. All other folders are ordered by a number in their manifests. `manifest.py` sets it to one more
   than the highest number in the neighbouring folders.

    step-100 (number 1), step-200 (2), best (3)     newest: the folder "best"
    step-100 (number 1), best (2), step-200 (3)     newest: the folder "step-200"

Manifests of older versions have no number and count as number 0. Two folders with number 0 are
ordered by the times in their manifests, unless rule 1 orders them.
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
    """A checkpoint folder and when it was written.

    Attributes:
        number: the number in its manifest; 0 if the manifest has none.
        time: the time in its manifest, in seconds since 1970 by the clock of rank 0.
    """

    folder: Path
    number: int = 0
    time: float = 0.0


def sort_newest_last(saved: Iterable[Saved]) -> list[Path]:
    """Sort the checkpoints of one folder by the rules of this module."""
    by_prefix: dict[str, list[tuple[int, Saved]]] = defaultdict(list)
    for checkpoint in saved:
        name = checkpoint.folder.name
        match = _NUMBERED.fullmatch(name)
        # A name without a number is a series of one checkpoint. No prefix contains "/".
        prefix, step = (match[1], int(match[2])) if match else (f"/{name}", 0)
        by_prefix[prefix].append((step, checkpoint))
    for series in by_prefix.values():
        series.sort(key=lambda pair: (pair[0], *_make_sort_key(pair[1])))
    in_order = sorted(by_prefix.values(), key=lambda series: _make_sort_key(series[-1][1]))
    return [checkpoint.folder for series in in_order for _, checkpoint in series]


def _make_sort_key(checkpoint: Saved) -> tuple[int, float, str]:
    """Make the sort key of rule 2. The time is used only if the number is 0."""
    time = 0.0 if checkpoint.number else checkpoint.time
    return checkpoint.number, time, checkpoint.folder.name
