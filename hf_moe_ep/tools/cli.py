"""The command `hf-moe-ep`, also `python -m hf_moe_ep.tools.cli`.

    hf-moe-ep export-adapter out/adapter out/adapter-for-vllm
    hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
    hf-moe-ep verify out/model
    hf-moe-ep inspect --plan out/config.json --world 64 --ep 8

A wrong argument or folder ends with exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_moe_ep.lora.export import Converted, export_adapter, fuse_adapter
from hf_moe_ep.tools import files_command, inspect_command

_FORMS = {"per-expert": export_adapter, "fused": fuse_adapter}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of `sys.argv`; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"hf-moe-ep: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-moe-ep", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser(
        "export-adapter",
        help="rewrite LoRA on stacked experts for servers that read single experts, and back",
        description="Rewrite a PEFT adapter folder without loss: LoRA on stacked experts "
        "(target_parameters) as LoRA on single experts (target_modules), or back.",
    )
    export.add_argument("source", help="folder with adapter_config.json, adapter_model.safetensors")
    export.add_argument("target", help="folder to write; must be missing or empty")
    export.add_argument("--to", choices=_FORMS, default="per-expert", help="default: %(default)s")
    export.set_defaults(run=_run_export)
    files_command.add_parsers(commands)
    inspect_command.add_parser(commands)
    return parser


def _run_export(options: argparse.Namespace) -> None:
    done: Converted = _FORMS[options.to](options.source, options.target)
    print(
        f"{options.target}: {done.layers} layers, {done.experts} experts each, {done.tensors} "
        f"tensors of experts, {done.copied} copied, {done.bytes} bytes"
    )
    for note in done.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    sys.exit(main())
