"""Run a script or a module with expert parallelism inside a launcher, as `hf-moe-ep run` does.

    torchrun --nproc_per_node 8 -m hf_moe_ep.run --ep-size 8 train.py --lr 1e-5
    accelerate launch --config_file fsdp2.yaml -m hf_moe_ep.run --ep-size 8 -m trl.scripts.sft ...

The launcher starts this module in each rank. The module replaces its process by a new Python
process, which gets the same interpreter options and runs the script or module with its arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from hf_moe_ep.cli.run import DESCRIPTION, add_dry_run
from hf_moe_ep.runner.environment import run_command
from hf_moe_ep.runner.options import add_settings, variables

# The option that starts this module: "-m hf_moe_ep.run", or with flags in front of the letter m
# "-um hf_moe_ep.run". Python accepts both forms without the space, too.
_OWN_MODULE = re.compile(r"(?P<flags>-[bBdEhiIOPqsSuvx]*)m ?hf_moe_ep\.run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by Python with the script or module in `arguments`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if bool(options.module) == bool(script):
        parser.error("name a script, or a module: -m MODULE")
    target = script or ["-m", *options.module]
    command = [sys.executable, *find_interpreter_options(sys.orig_argv), *target]
    try:
        return run_command(command, *variables(options), dry_run=options.dry_run)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_moe_ep.run", description=DESCRIPTION, allow_abbrev=False
    )
    add_settings(parser)
    add_dry_run(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE ...",
        help="a module to run, and its arguments",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="a script to run, and its arguments",
    )
    return parser


def find_interpreter_options(words: Sequence[str]) -> list[str]:
    """Find the interpreter options among the words with which Python was started.

    ["python", "-u", "-m", "hf_moe_ep.run", "--ep-size", "8", "train.py"] -> ["-u"]
    ["python", "-um", "hf_moe_ep.run", "--ep-size", "8", "train.py"] -> ["-u"]
    """
    for index in range(1, len(words)):
        for end in (index + 1, index + 2):
            found = _OWN_MODULE.fullmatch(" ".join(words[index:end]))
            if found:
                flags = found["flags"]
                return [*words[1:index], *([flags] if flags != "-" else [])]
    return []


if __name__ == "__main__":
    sys.exit(main())
