"""`hf-moe-ep merge-adapter`: merge a LoRA adapter into its base model, from disk to disk.

hf-moe-ep merge-adapter Qwen/Qwen3-30B-A3B out/adapter out/model
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_moe_ep.cli.printing import add_ignore_unexpected, add_trust_remote_code


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "merge-adapter",
        description="Merge a LoRA adapter (of hf_moe_ep, PEFT or transformers) into its base "
        "model and write the result, as PEFT's merge_and_unload and save_pretrained would, but "
        "without loading the model. rsLoRA, modules_to_save and biases are merged as well. DoRA "
        "and similar adapters, and quantised base models, are refused. The target folder appears "
        "only when it is complete.",
    )
    parser.add_argument(
        "base", help="folder of the base model, which must not be quantised, or its name on the hub"
    )
    parser.add_argument(
        "adapter", help="folder with adapter_config.json and adapter_model.safetensors"
    )
    parser.add_argument("target", help="folder to write; it must be missing or empty")
    add_ignore_unexpected(parser)
    add_trust_remote_code(parser)


def run(options: argparse.Namespace) -> int:
    """Merge the adapter, and print the size of the model and notes for the user."""
    from hf_moe_ep.checkpoints.merge import merge_adapter

    result = merge_adapter(
        options.base,
        options.adapter,
        options.target,
        ignore_unexpected=options.ignore_unexpected,
        trust_remote_code=options.trust_remote_code,
    )
    print(
        f"{options.target}: {result.changed} of {result.parameters} parameters changed, "
        f"{result.bytes:,} bytes of tensors in {result.files} files"
    )
    for note in result.notes:
        print(f"note: {note}")
    return 0
