"""`hf-moe-ep verify`: read all files of a checkpoint and check them for damage.

hf-moe-ep verify out/model
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_moe_ep.cli.printing import add_ignore_unexpected, add_trust_remote_code, print_found


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify",
        description="Read every file of a model or training checkpoint; compare files with the "
        "hashes in the manifest, and tensors with the headers of their files and the config.",
    )
    parser.add_argument("folder", help="folder of a model or of a training checkpoint")
    add_ignore_unexpected(parser)
    add_trust_remote_code(parser)


def run(options: argparse.Namespace) -> int:
    """Print which checks have passed. Raises ValueError if the checkpoint is damaged."""
    from hf_moe_ep.checkpoints.verify import verify

    found = verify(
        options.folder,
        ignore_unexpected=options.ignore_unexpected,
        trust_remote_code=options.trust_remote_code,
    )
    print_found(options.folder, found)
    return 0
