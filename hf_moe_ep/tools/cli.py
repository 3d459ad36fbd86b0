"""The command `hf-moe-ep`, also `python -m hf_moe_ep`.

    hf-moe-ep doctor
    hf-moe-ep export-adapter out/adapter out/adapter-for-vllm
    hf-moe-ep merge-adapter Qwen/Qwen3-30B-A3B out/adapter out/model
    hf-moe-ep convert out/checkpoint-300 out/model --config Qwen3-30B-A3B
    hf-moe-ep verify out/model
    hf-moe-ep inspect --plan out/config.json --world 64 --ep 8
    hf-moe-ep plan out/config.json --gpus 64 --gpu-memory 80 --seq 4096 --batch 64

One file per command: each module has `add_parser(subparsers)` and `run(options) -> int`, the exit
code. A wrong argument or folder ends with exit code 2 and one line on stderr, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from hf_moe_ep.tools import doctor_command

_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of `sys.argv`; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="hf-moe-ep",
        description="Look at, check and rewrite models, checkpoints and adapters, without a "
        "training job. Of a command: hf-moe-ep COMMAND --help.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor_command.add_parser(subparsers)
    if arguments[:1] != ["doctor"]:
        for command in _other_commands():
            command.add_parser(subparsers)
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


def _other_commands() -> tuple[ModuleType, ...]:
    """Import the others: they need the whole package, which fails where a doctor is called."""
    from hf_moe_ep.tools import (
        convert_command,
        export_adapter_command,
        inspect_command,
        merge_adapter_command,
        plan_command,
        verify_command,
    )

    return (
        inspect_command,
        plan_command,
        verify_command,
        convert_command,
        export_adapter_command,
        merge_adapter_command,
    )


if __name__ == "__main__":
    sys.exit(main())
