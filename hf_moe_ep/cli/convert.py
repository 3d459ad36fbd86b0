"""`hf-moe-ep convert`: convert a training checkpoint into a Hugging Face model folder.

hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_moe_ep.cli.printing import add_trust_remote_code

_DTYPES = ("bfloat16", "float16", "float32")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        description="Convert a training checkpoint (of the Trainer, accelerator.save_state or "
        "save_checkpoint, written by any number of ranks) into a model folder for from_pretrained "
        "and inference servers. The command runs in one process, with one tensor in memory at a "
        "time.",
    )
    parser.add_argument("source", help="folder of the training checkpoint")
    parser.add_argument("target", help="folder to write; it must be missing or empty")
    parser.add_argument(
        "--config",
        metavar="FOLDER",
        help="folder of the model's config and tokenizer; needed if the checkpoint has no "
        "config.json (accelerator.save_state)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of the written weights; default: the dtype in which from_pretrained loads "
        "each weight",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="split the weights into files of at most SIZE; default: %(default)s",
    )
    parser.add_argument(
        "--no-check-hashes",
        action="store_true",
        help="do not compare the checkpoint's files with the hashes in its manifest",
    )
    parser.add_argument(
        "--no-extra-tensors",
        action="store_true",
        help="do not copy tensors that the model's class ignores (such as layers for multi-token "
        "prediction) from the checkpoint that the run had loaded",
    )
    add_trust_remote_code(parser)


def run(options: argparse.Namespace) -> int:
    """Convert the checkpoint, and print the size of the model."""
    import torch

    from hf_moe_ep.checkpoints.convert import convert

    size = convert(
        options.source,
        options.target,
        config=options.config,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
        check_hashes=not options.no_check_hashes,
        extra_tensors=not options.no_extra_tensors,
        trust_remote_code=options.trust_remote_code,
    )
    print(f"{options.target}: {size:,} bytes of tensors")
    return 0
