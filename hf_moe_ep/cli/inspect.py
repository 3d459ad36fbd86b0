"""`hf-moe-ep inspect`: show which program wrote a checkpoint, when, and at which layout.

hf-moe-ep inspect out/checkpoint-300
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_moe_ep.cli.printing import print_found


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        description="Show which program wrote a checkpoint, when, and at which parallel layout. "
        "The tensors are not read; use hf-moe-ep verify for that.",
    )
    parser.add_argument("folder", help="folder of a model or of a training checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def run(options: argparse.Namespace) -> int:
    """Print the facts about a checkpoint."""
    from hf_moe_ep.checkpoints.verify import describe_checkpoint

    checkpoint = describe_checkpoint(options.folder)
    if options.json:
        print(json.dumps({"what": checkpoint.summary} | checkpoint.facts, indent=2))
    else:
        print_found(options.folder, checkpoint)
    return 0
