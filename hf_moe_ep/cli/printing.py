"""Add options, and print descriptions of checkpoints, for several commands."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_moe_ep.checkpoints.verify import Found


def add_trust_remote_code(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-remote-code` to a command that builds a model from a folder."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python files of a model whose config names a class in them",
    )


def add_ignore_unexpected(parser: argparse.ArgumentParser) -> None:
    """Add `--ignore-unexpected`, for tensors that the model's class neither has nor ignores."""
    parser.add_argument(
        "--ignore-unexpected",
        action="append",
        default=[],
        metavar="REGEX",
        help="accept tensors that do not belong to the model if REGEX is found in their keys; may "
        "be repeated. Tensors that the model's class ignores are always accepted",
    )


def print_found(folder: str, checkpoint: Found) -> None:
    """Print what kind of checkpoint a folder holds, then one fact per line."""
    print(f"{folder}: {checkpoint.summary}")
    width = max(map(len, checkpoint.facts), default=0)
    for name, value in checkpoint.facts.items():
        if name == "time":
            written = datetime.fromtimestamp(float(value), timezone.utc)
            value = f"{written:%Y-%m-%d %H:%M:%S} UTC"
        print(f"  {name:<{width}}  {value}")
