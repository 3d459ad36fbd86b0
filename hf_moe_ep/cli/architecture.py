"""`hf-moe-ep architecture`: what is derived from a model's config, and what is granted to it.

hf-moe-ep architecture mixtral
hf-moe-ep architecture Qwen/Qwen3-30B-A3B
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_moe_ep.planner.architecture import lines, look_at
from hf_moe_ep.planner.config import known_shapes


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "architecture",
        description="Print where the parts of a model are, as derived from its config, and "
        "what is granted to it: ep sizes, LoRA on experts, sequence parallelism, pictures.",
    )
    models = ", ".join(known_shapes())
    parser.add_argument(
        "model",
        help="a model type of transformers, a folder, a config.json, a name on the hub, or offline "
        f"one of {models}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan of an architecture.

    Raises:
        ValueError: it has none, or there is no such config.
    """
    found = look_at(options.model)
    text = json.dumps(found.as_json(), indent=2) if options.json else None
    print(text or "\n".join(lines(found, options.model)))
    return 0
