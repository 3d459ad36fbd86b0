"""`hf-moe-ep inspect`: what wrote a checkpoint, and at which layout.

hf-moe-ep inspect out/checkpoint-300
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_moe_ep.checkpoints.verify import look
from hf_moe_ep.cli.printing import print_found


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "inspect",
        description="Print what wrote a checkpoint, when, and at which layout. Contents are not "
        "read; hf-moe-ep verify does that.",
    )
    parser.add_argument("folder", help="folder of a checkpoint, of a model or of training")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what a checkpoint is.

    Raises:
        ValueError: the folder holds no checkpoint.
    """
    checkpoint = look(options.folder)
    if options.json:
        print(json.dumps({"what": checkpoint.what} | checkpoint.facts, indent=2))
    else:
        print_found(options.folder, checkpoint)
    return 0
