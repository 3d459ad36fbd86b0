"""The command `hf-moe-ep`, also `python -m hf_moe_ep`.

Each command is a module with `add_parser(subparsers)` and `run(options)`, which returns the exit
code. A module is imported only when its command is used, and `run` imports the modules that need
torch. Help and mistyped commands therefore do not wait for torch, and `doctor` starts even if the
rest of the package cannot be imported. A wrong argument or folder gives one line on stderr (after
the usage if argparse refuses it) and exit code 2. Ctrl-C gives exit code 130.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from hf_moe_ep.config import suggest_name
from hf_moe_ep.version import __version__

# Command -> its line in the help. The module of "export-adapter" is `export_adapter.py`.
COMMANDS = {
    "doctor": "check whether training can run on this machine",
    "run": "run another project's training command with expert parallelism",
    "architecture": "show which features are supported for a model, from its config",
    "memory": "plan the memory per GPU that training needs at one parallel layout",
    "plan": "list parallel layouts that fit on N GPUs, the best first",
    "inspect": "show which program wrote a checkpoint, when, and at which layout",
    "verify": "read all files of a checkpoint and check them for damage",
    "convert": "convert a training checkpoint into a Hugging Face model folder",
    "export-adapter": "convert LoRA on stacked experts to LoRA on single experts, or back",
    "merge-adapter": "merge a LoRA adapter into its base model with little memory",
}
_INTERRUPTED = 130  # the exit code of shells: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: `sys.argv`) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, usage = _build_parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(arguments)
    # PEFT imports bitsandbytes, which warns if it does not find its training kernels. No command
    # uses these kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        if unknown:
            raise ValueError(_explain_unknown_argument(arguments[0], unknown, usage))
        code: int = options.run(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"hf-moe-ep: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-moe-ep: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return code


def _explain_unknown_argument(command: str, unknown: Sequence[str], usage: str) -> str:
    """Return the text of the error for arguments that are not in the command's usage."""
    name = unknown[0].partition("=")[0]
    meant = suggest_name(name, re.findall(r"--[a-z][\w-]*", usage), "--")
    return f'unknown argument {name}{meant}; "hf-moe-ep {command} --help" lists the arguments'


def _build_parser(used_command: str) -> tuple[argparse.ArgumentParser, str]:
    """Build the parser of all commands, and return it with the usage of `used_command`.

    Only the module of `used_command` is imported, so only this command gets its options. Every
    other command gets a line in the help.
    """
    parser = argparse.ArgumentParser(
        prog="hf-moe-ep",
        description="Plan and run MoE training; inspect, check and convert checkpoints and "
        'adapters. Run "hf-moe-ep COMMAND --help" for the options of a command.',
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hf-moe-ep {__version__}",
        help="print the version of hf_moe_ep and exit",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, summary in COMMANDS.items():
        if command == used_command:
            module = import_module(f"hf_moe_ep.cli.{command.replace('-', '_')}")
            module.add_parser(subparsers)
            subparsers.choices[command].set_defaults(run=module.run)
        else:
            subparsers.add_parser(command, help=summary)
    used = subparsers.choices.get(used_command, parser)
    return parser, used.format_usage()


if __name__ == "__main__":
    sys.exit(main())
