"""`hf-moe-ep export-adapter`: convert an adapter for servers that read single experts, or back.

hf-moe-ep export-adapter out/adapter out/adapter-for-vllm
hf-moe-ep export-adapter out/adapter-for-vllm out/adapter-fused --to fused
"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export-adapter",
        description="Convert a PEFT adapter folder without loss from LoRA on stacked experts "
        "(target_parameters) to LoRA on single experts (target_modules), or back.",
    )
    parser.add_argument(
        "source", help="folder with adapter_config.json and adapter_model.safetensors"
    )
    parser.add_argument("target", help="folder to write; it must be missing or empty")
    parser.add_argument(
        "--to",
        choices=("per-expert", "fused"),
        default="per-expert",
        help="per-expert: the form that inference servers read; fused: the form that training "
        "uses; default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Convert the adapter, and print the contents of the new folder and notes about its format."""
    from hf_moe_ep.lora.export import export_adapter, fuse_adapter

    rewrite = export_adapter if options.to == "per-expert" else fuse_adapter
    result = rewrite(options.source, options.target)
    print(
        f"{options.target}: {result.layers} layers, {result.experts} experts each, "
        f"{result.tensors} tensors of experts, {result.copied} copied, {result.bytes} bytes"
    )
    for note in result.notes:
        print(f"note: {note}")
    return 0
