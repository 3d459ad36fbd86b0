"""`hf-moe-ep merge-adapter`: a LoRA adapter merged into its base model, on a disk.

hf-moe-ep merge-adapter Qwen/Qwen3-30B-A3B out/adapter out/model
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_moe_ep.checkpoints.merge import merge_adapter


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "merge-adapter",
        description="Write the base model with a LoRA adapter (of ours, PEFT, transformers) "
        "merged into it: what PEFT's merge_and_unload and save_pretrained would write, "
        "without the model in memory; rsLoRA, modules_to_save and biases too. DoRA and its like "
        "and quantized bases are refused. The target appears whole or not at all.",
    )
    parser.add_argument("base", help="folder of the base model in bf16, or its name on the hub")
    parser.add_argument(
        "adapter", help="folder with adapter_config.json, adapter_model.safetensors"
    )
    parser.add_argument("target", help="folder to write; must be missing or empty")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the model, and print its size and what its user may not expect."""
    done = merge_adapter(options.base, options.adapter, options.target)
    print(
        f"{options.target}: {done.changed} of {done.parameters} parameters changed, "
        f"{done.bytes:,} bytes of tensors in {done.files} files"
    )
    for note in done.notes:
        print(f"note: {note}")
    return 0
