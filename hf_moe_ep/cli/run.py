"""`hf-moe-ep run`: run another project's training command with expert parallelism.

    hf-moe-ep run --ep-size 8 -- axolotl train cfg.yml
    hf-moe-ep run --ep-size 8 --sp-size 2 -- accelerate launch --config_file fsdp2.yaml train.py

Every MoE model that transformers loads or creates in a Python process of the command is patched
(`runner/hook.py`). The command and its options stay as they are.
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_moe_ep.runner.environment import run_command
from hf_moe_ep.runner.options import add_settings, variables

DESCRIPTION = (
    "Run a training command of another project with expert parallelism. Each Mixture-of-Experts "
    "model that transformers loads or creates in a Python process of the command is patched. The "
    "trainer must shard with FSDP2: see docs/trainers.md for its option. Each setting can also be "
    "an environment variable: HF_MOE_EP_EP_SIZE=8 is --ep-size 8."
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("run", description=DESCRIPTION, allow_abbrev=False)
    add_settings(parser)
    add_dry_run(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="the command with all its options, unchanged",
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option --dry-run."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the environment variables and the command, and start nothing",
    )


def run(options: argparse.Namespace) -> int:
    """Replace this process by the command."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return run_command(command, *variables(options), dry_run=options.dry_run)
