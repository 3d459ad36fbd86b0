"""The command `hf-moe-ep`, also `python -m hf_moe_ep`.

    hf-moe-ep doctor
    hf-moe-ep export-adapter out/adapter out/adapter-for-vllm
    hf-moe-ep merge-adapter Qwen/Qwen3-30B-A3B out/adapter out/model
    hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
    hf-moe-ep verify out/model
    hf-moe-ep inspect out/checkpoint-300
    hf-moe-ep architecture mixtral
    hf-moe-ep memory Qwen/Qwen3-30B-A3B --gpus 64 --ep 8 --gpu-memory 80
    hf-moe-ep plan out/config.json --gpus 64 --gpu-memory 80 --seq 4096 --batch 64

One file per command: each module has `add_parser(subparsers)` and `run(options) -> int`, the exit
code. A module is imported only when its command is named, so that help and typing errors do not
wait for torch, and so that `doctor` starts where the rest of the package does not. A wrong argument
or folder ends with exit code 2 and one line on stderr, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from hf_moe_ep.version import __version__

# The help line of each command; `export-adapter` is defined in `export_adapter.py`.
_COMMANDS = {
    "doctor": "would training run here? one screen for an issue report",
    "architecture": "print what is derived from a model's config, and what is granted to it",
    "memory": "plan the memory of a model's training at one layout",
    "plan": "try layouts of a model on some GPUs: which fit, and how fast they are",
    "inspect": "print what wrote a checkpoint, and at which layout",
    "verify": "read a checkpoint and check that it is whole",
    "convert": "write the model of a training checkpoint in the layout of the hub",
    "export-adapter": "rewrite LoRA on stacked experts as LoRA on single experts, or back",
    "merge-adapter": "merge a LoRA adapter into its base model, a few experts in memory at a time",
}
_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of `sys.argv`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ValueError, OSError) as error:
        print(f"hf-moe-ep: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-moe-ep: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _parser(named: str) -> argparse.ArgumentParser:
    """Build the parser of all commands, with the options of the named command alone."""
    parser = argparse.ArgumentParser(
        prog="hf-moe-ep",
        description="Inspect, check and rewrite models, checkpoints and adapters without a "
        'training job. Run "hf-moe-ep COMMAND --help" for the options of a command.',
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hf-moe-ep {__version__}",
        help="print the version of hf_moe_ep and exit",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, summary in _COMMANDS.items():
        if command == named:
            module = import_module(f"hf_moe_ep.cli.{command.replace('-', '_')}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(command, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
