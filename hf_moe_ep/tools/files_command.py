"""`hf-moe-ep convert` and `hf-moe-ep verify`: checkpoints without a training job.

hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
hf-moe-ep verify out/model
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_moe_ep.checkpoints.convert import Found, convert, verify

_DTYPES = ("bfloat16", "float16", "float32")


def add_parsers(commands: Any) -> None:
    """Add both commands to the subparsers of `cli.py`."""
    parser = commands.add_parser(
        "convert",
        help="write the model of a training checkpoint in the layout of the hub",
        description="Write the model of a training checkpoint (Trainer, accelerator.save_state, "
        "save_checkpoint; any number of ranks) in the layout of the hub, for from_pretrained and "
        "servers. One process, one tensor in memory at a time.",
    )
    parser.add_argument("source", help="folder of the training checkpoint")
    parser.add_argument("target", help="folder to write; must be missing or empty")
    parser.add_argument("--config", metavar="FOLDER", help="the model's config and tokenizer")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: what the config says")
    parser.add_argument("--max-shard-size", default="5GB", help="default: %(default)s")
    parser.set_defaults(run=_run_convert)
    parser = commands.add_parser(
        "verify",
        help="read a checkpoint and check that it is whole",
        description="Read every file of a checkpoint, of a model or of training, against its "
        "hashes, its headers and its config.",
    )
    parser.add_argument("folder")
    parser.set_defaults(run=_run_verify)


def print_found(folder: str, found: Found) -> None:
    """One line, then what is known, one fact a line."""
    print(f"{folder}: {found.what}")
    width = max(map(len, found.facts), default=0)
    for name, value in found.facts.items():
        print(f"  {name:<{width}}  {value}")


def _run_convert(options: argparse.Namespace) -> None:
    size = convert(
        options.source,
        options.target,
        config=options.config,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
    )
    print(f"{options.target}: {size:,} bytes of tensors")


def _run_verify(options: argparse.Namespace) -> None:
    print_found(options.folder, verify(options.folder))
