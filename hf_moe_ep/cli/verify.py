"""`hf-moe-ep verify`: read a checkpoint and check that it is whole.

hf-moe-ep verify out/model
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.cli.printing import print_found


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "verify",
        description="Read every file of a checkpoint, of a model or of training, against its "
        "hashes, its headers and its config.",
    )
    parser.add_argument("folder", help="a checkpoint, of a model or of training")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was checked; what is wrong is raised."""
    found = verify(options.folder)
    if found.facts.get("hashes") == "none are known":
        found = replace(found, what="headers only, contents were not checked")
    print_found(options.folder, found)
    return 0
