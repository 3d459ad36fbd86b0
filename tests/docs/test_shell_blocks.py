"""Every command in a shell block of README, docs/ and examples/ exists, and takes its options.

A command is parsed, not run: by the parser that would parse it, where the command is ours or
Accelerate's; other programs are known by the options that the pages use. A command that is in no
row of `COMMANDS` makes the test fail.
"""

import argparse
import configparser
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from support import pages
from transformers import HfArgumentParser

from hf_moe_ep.cli import main as cli

ROOT = pages.ROOT
BLOCKS = [
    block for page in pages.names() for block in pages.blocks(page) if block.language == "bash"
]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without variables in front, comments and continued lines."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def ours(*words: str) -> None:
    cli._parser(words[0]).parse_args(words)


def accelerate(*words: str) -> None:
    assert words[0] == "launch"
    options = launch_command_parser().parse_args(words[1:])
    config = yaml.safe_load((ROOT / options.config_file).read_text())
    assert config["distributed_type"] == "FSDP"
    script(options.training_script, *options.training_script_args)


class _Parsed(Exception):
    """The script has parsed its options."""


def script(name: str, *options: str) -> None:
    """A script of examples/ parses its options; train.py is the reader's own."""
    if name == "train.py":
        assert not options
        return
    if "--bf16" in options:
        options += ("--use_cpu",)  # TrainingArguments refuse bf16 where they see neither
    module = importlib.import_module(Path(name).stem)
    assert Path(str(module.__file__)) == ROOT / name

    def parsed(parse: Callable[..., Any]) -> Callable[..., Any]:
        def stop(self: Any, *args: Any, **kwargs: Any) -> None:
            parse(self, *args, **kwargs)
            raise _Parsed

        return stop

    hf, plain = HfArgumentParser.parse_args_into_dataclasses, argparse.ArgumentParser.parse_args
    with (
        mock.patch.object(sys, "argv", [name, *options]),
        mock.patch.object(HfArgumentParser, "parse_args_into_dataclasses", parsed(hf)),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parsed(plain)),
        pytest.raises(_Parsed),
    ):
        module.main()
    AcceleratorState._reset_state(True)  # TrainingArguments have made one


def pip(*words: str) -> None:
    """`pip install`: a local folder with extras of setup.cfg, or a package."""
    assert words[0] == "install"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"^\.\[(.*)\]$", words[1]):
        assert set(extras.split(",")) <= set(setup["options.extras_require"])


def make(*words: str) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets


def sbatch(*words: str) -> None:
    number, batch, *rest = words
    assert number.startswith("--nodes=") and (ROOT / batch).is_file()
    script(*rest)


def torchrun(*words: str) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    script(options.training_script, *options.training_script_args)


def torchfrtrace(*words: str) -> None:
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    JobConfig().parse_args(words)


def python(*words: str) -> None:
    assert words[:2] == ("-m", "pytest") and (ROOT / words[2]).exists()


def bash(*words: str) -> None:
    assert (ROOT / words[0]).is_file()


def export(*words: str) -> None:
    assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in words)


COMMANDS: dict[str, Callable[..., None]] = {
    "hf-moe-ep": ours,
    "accelerate": accelerate,
    "pip": pip,
    "make": make,
    "sbatch": sbatch,
    "torchrun": torchrun,
    "torchfrtrace": torchfrtrace,
    ".venv/bin/python": python,
    "bash": bash,
    "export": export,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_exist_and_take_their_options(block: pages.Block) -> None:
    found = list(commands(block.text))
    assert found
    for name, *words in found:
        COMMANDS[name](*words)


@pytest.mark.parametrize("page", pages.names())
def test_commands_in_the_text(page: str) -> None:
    """`make demo` and `hf-moe-ep doctor` in a sentence: the first word is a target, a command."""
    for span in pages.spans(page):
        if span.startswith("make "):
            make(*span.split()[1:])
        if match := re.match(r"hf-moe-ep ([a-z-]+)", span):
            with pytest.raises(SystemExit) as stopped:
                cli.main([match[1], "--help"])
            assert stopped.value.code == 0, span


def test_a_command_that_does_not_exist_is_found() -> None:
    for wrong in (["memory", "model", "--gpu-memroy", "80"], ["memroy", "model"]):
        with pytest.raises(SystemExit):
            ours(*wrong)
    with pytest.raises(SystemExit):
        accelerate("launch", "--config_fiel", "examples/accelerate/gpu_8.yaml", "train.py")
    with pytest.raises((SystemExit, ValueError)):
        script("examples/finetune_text.py", "--model", "m", "--output_dir", "o", "--ep_sise", "8")


def test_every_language_is_checked() -> None:
    """`text` and `mermaid` are pictures and printed output; everything else has a test."""
    found = {block.language for page in pages.names() for block in pages.blocks(page)}
    assert found <= {"python", "bash", "text", "mermaid"}


def test_blocks_as_they_are_read() -> None:
    page = "a\n\n```python\nx = 1\n```\nb\n```bash\nls\n```\n\n```python\ny\n```\n"
    assert [block[1:] for block in pages.blocks("p", page)] == [
        (0, "python", "x = 1\n"),
        (0, "bash", "ls\n"),
        (1, "python", "y\n"),
    ]
    for bad in ("```\nx\n```\n", "a\n\n    indented\n", "```python\nx\n"):
        with pytest.raises(ValueError, match="p: "):
            pages.blocks("p", bad)
