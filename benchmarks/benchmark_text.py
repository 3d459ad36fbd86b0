"""Format the results of a benchmark: spreads, ratios, and its command, machine and versions."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers


def format_row(name: str, ours: list[float], theirs: list[float]) -> str:
    """Return the table cells `name | ours | theirs | ratio`. Values are compared pairwise."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return " | ".join([name, spread(ours), spread(theirs), spread(ratios) if ratios else "-"])


def spread(values: list[float]) -> str:
    """Return "median (min .. max)", or only the median if rounding makes the three equal."""
    low, middle, high = min(values), statistics.median(values), max(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    if f"{low:.{digits}f}" == f"{high:.{digits}f}":
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def describe_machine(script: str, load_before: float, num_ranks: int) -> list[str]:
    """Return a Markdown list of the command, the machine and the versions.

    Call this function after the run, because it reads the load average at the end of the run.
    """
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return [
        f"- command: `{shlex.join(['python', script, *sys.argv[1:]])}`",
        f"- machine: {(names or [platform.machine()])[0]}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory:.0f} GiB; load average {load_before:.1f} before the run and "
        f"{os.getloadavg()[0]:.1f} at its end; the ranks of this benchmark account for {num_ranks}",
        f"- versions: torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; commit {commit or 'unknown'}; {time.strftime('%Y-%m-%d')}",
    ]
