"""`hf-moe-ep convert`: the model of a training checkpoint in hub layout, without a training job.

hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hf_moe_ep.checkpoints.convert import convert

_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "convert",
        description="Write the model of a training checkpoint (Trainer, accelerator.save_state, "
        "save_checkpoint; any number of ranks) in the layout of the hub, for from_pretrained and "
        "servers. One process, one tensor in memory at a time.",
    )
    parser.add_argument("source", help="folder of the training checkpoint")
    parser.add_argument("target", help="folder to write; must be missing or empty")
    parser.add_argument("--config", metavar="FOLDER", help="the model's config and tokenizer")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: what the config says")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file; default: %(default)s"
    )
    parser.add_argument(
        "--no-check-hashes",
        action="store_true",
        help="do not compare the files that are read with the hashes in the manifest",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the model and print its size."""
    size = convert(
        options.source,
        options.target,
        config=options.config,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
        check_hashes=not options.no_check_hashes,
    )
    print(f"{options.target}: {size:,} bytes of tensors")
    return 0
