"""`hf-moe-ep doctor`: would training run here? One screen, to be pasted into an issue.

hf-moe-ep doctor
accelerate launch --config_file FILE -m hf_moe_ep doctor
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from hf_moe_ep.config import launched_rank
from hf_moe_ep.doctor import Section, examine, fails

_WIDTH = 98
_INDENT = 26


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "doctor",
        description="Print the versions found and allowed, what the machine has and what follows "
        "from it, and the launch configuration. Exit code 1 where training would fail.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report, on rank 0 alone; 1 where something in it would fail."""
    if launched_rank() != 0:
        return 0
    sections = examine()
    print(as_text(sections))
    return 1 if fails(sections) else 0


def as_text(sections: list[Section]) -> str:
    """Lay the report out in ASCII, no line longer than a screen is wide."""
    lines = []
    for section in sections:
        lines.append(section.title)
        for found in section.findings:
            label = f"  {found.mark:<4}  {found.name:<16}  "
            lines += textwrap.wrap(
                label + found.text,
                _WIDTH,
                subsequent_indent=" " * _INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
    failed = fails(sections)
    if failed:
        lines.append(f"{len(failed)} to mend: {', '.join(found.name for found in failed)}")
    else:
        lines.append("training can run here")
    return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")
