"""`hf-moe-ep doctor`: check if training can run on this machine, and print a one-page report.

hf-moe-ep doctor
accelerate launch --config_file FILE -m hf_moe_ep doctor
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from hf_moe_ep.config import get_launched_rank
from hf_moe_ep.doctor import Finding, examine, list_failures

_WIDTH = 98
_INDENT = 26


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser(
        "doctor",
        description="Check the installed versions, the GPUs and libraries of this machine, and the "
        "launch configuration, and show which code they make training use. The exit code is 1 if "
        "training would fail.",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report on rank 0; return 1 if training would fail."""
    if get_launched_rank() != 0:
        return 0
    sections = examine()
    print(format_report(sections))
    return 1 if list_failures(sections) else 0


def format_report(sections: dict[str, list[Finding]]) -> str:
    """Format the report in ASCII, in lines of at most 98 characters."""
    lines = []
    for title, findings in sections.items():
        lines.append(title)
        for finding in findings:
            label = f"  {finding.mark:<4}  {finding.name:<16}  "
            lines += textwrap.wrap(
                label + finding.text,
                _WIDTH,
                subsequent_indent=" " * _INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
    failed = list_failures(sections)
    if failed:
        lines.append(f"{len(failed)} to fix: {', '.join(finding.name for finding in failed)}")
    else:
        lines.append("training can run here")
    return "\n".join(lines).encode("ascii", "backslashreplace").decode("ascii")
