"""`hf-moe-ep architecture`: show which features are supported for a model, from its config alone.

hf-moe-ep architecture mixtral
hf-moe-ep architecture Qwen/Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_moe_ep.planner.options import read_published_configs


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "architecture",
        description="Derive from a model's config where its layers, experts and router are, and "
        "which features are supported for it: expert parallelism and its sizes, LoRA on experts, "
        "sequence parallelism, pictures.",
    )
    models = ", ".join(read_published_configs())
    parser.add_argument(
        "model",
        help="a model type of transformers, a folder, a config.json or a name on the hub; these "
        f"names need no download: {models}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Print the architecture of a model and the features that are supported for it."""
    from hf_moe_ep.planner.architecture import format_architecture, inspect_architecture

    architecture = inspect_architecture(options.model)
    if options.json:
        print(json.dumps(architecture.as_json(), indent=2))
    else:
        print("\n".join(format_architecture(architecture, options.model)))
    return 0
