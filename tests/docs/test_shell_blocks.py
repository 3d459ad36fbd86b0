"""Every command in a shell block of README, docs/ and examples/ exists and takes its options.

Commands are parsed, not run. Our commands and Accelerate's are parsed by their own parsers. The
functions for other programs check what the pages use. A command without a row in `COMMANDS` makes
the test fail.
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

from hf_moe_ep import run
from hf_moe_ep.cli import main as cli
from hf_moe_ep.runner.options import variables

ROOT = pages.ROOT
BLOCKS = [
    block for page in pages.names() for block in pages.blocks(page) if block.language == "bash"
]

YAML_BLOCKS = [
    block for page in pages.names() for block in pages.blocks(page) if block.language == "yaml"
]


def split_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without leading variables, comments and line breaks."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def parse_ours(*words: str) -> None:
    parser, _ = cli._build_parser(words[0])
    options = parser.parse_args(words)
    if words[0] == "run":
        assert options.command[0] == "--" and len(options.command) > 2
        variables(options)
        check_files(*options.command)


def check_files(*words: str) -> None:
    """Check that the files of examples/ among the words of a trainer's command exist."""
    for word in words:
        assert not word.startswith("examples/") or (ROOT / word).is_file()


def parse_accelerate(*words: str) -> None:
    assert words[0] == "launch"
    options = launch_command_parser().parse_args(words[1:])
    config = yaml.safe_load((ROOT / options.config_file).read_text())
    assert config["distributed_type"] == "FSDP"
    parse_script(options.training_script, *options.training_script_args)


class _Parsed(Exception):
    """Raised when a script has parsed its options."""


def parse_script(name: str, *options: str) -> None:
    """Let a script of examples/ parse its options. train.py stands for the reader's script."""
    if name == "train.py":
        assert not options
        return
    if "--bf16" in options:
        options += ("--use_cpu",)  # TrainingArguments refuse bf16 without a GPU or use_cpu
    module = importlib.import_module(Path(name).stem)
    assert Path(str(module.__file__)) == ROOT / name

    def stop_after(parse: Callable[..., Any]) -> Callable[..., Any]:
        def stop(self: Any, *args: Any, **kwargs: Any) -> None:
            parse(self, *args, **kwargs)
            raise _Parsed

        return stop

    hf, plain = HfArgumentParser.parse_args_into_dataclasses, argparse.ArgumentParser.parse_args
    with (
        mock.patch.object(sys, "argv", [name, *options]),
        mock.patch.object(HfArgumentParser, "parse_args_into_dataclasses", stop_after(hf)),
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop_after(plain)),
        pytest.raises(_Parsed),
    ):
        module.main()
    AcceleratorState._reset_state(True)  # TrainingArguments have created this state


def check_pip(*words: str) -> None:
    """Check that extras of `pip install .[extras]` are in setup.cfg."""
    assert words[0] == "install"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"^\.\[(.*)\]$", words[1]):
        assert set(extras.split(",")) <= set(setup["options.extras_require"])


def check_make(*words: str) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets


def check_sbatch(*words: str) -> None:
    number, batch, *rest = words
    assert number.startswith("--nodes=") and (ROOT / batch).is_file()
    if rest[:2] == ["-m", "hf_moe_ep.run"]:
        parse_runner(*rest[2:])
    else:
        parse_script(*rest)


def parse_runner(*words: str) -> None:
    options = run._parser().parse_args(words)
    variables(options)
    parse_script(*options.script)


def parse_torchrun(*words: str) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    if options.training_script == "hf_moe_ep.run":
        assert options.module
        parse_runner(*options.training_script_args)
    else:
        parse_script(options.training_script, *options.training_script_args)


def parse_torchfrtrace(*words: str) -> None:
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    JobConfig().parse_args(words)


def check_pytest(*words: str) -> None:
    assert words[:2] == ("-m", "pytest") and (ROOT / words[2]).exists()


def check_bash(*words: str) -> None:
    assert (ROOT / words[0]).is_file()


def check_export(*words: str) -> None:
    assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in words)


COMMANDS: dict[str, Callable[..., None]] = {
    "hf-moe-ep": parse_ours,
    "axolotl": check_files,
    "swift": check_files,
    "accelerate": parse_accelerate,
    "pip": check_pip,
    "make": check_make,
    "sbatch": check_sbatch,
    "torchrun": parse_torchrun,
    "torchfrtrace": parse_torchfrtrace,
    ".venv/bin/python": check_pytest,
    "bash": check_bash,
    "export": check_export,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_exist_and_take_their_options(block: pages.Block) -> None:
    lines = list(split_commands(block.text))
    assert lines
    for name, *words in lines:
        COMMANDS[name](*words)


@pytest.mark.parametrize("page", pages.names())
def test_commands_in_sentences_exist(page: str) -> None:
    """Sentences name targets (`make demo`) and commands (`hf-moe-ep doctor`) that exist."""
    for span in pages.spans(page):
        if span.startswith("make "):
            check_make(*span.split()[1:])
        if match := re.match(r"hf-moe-ep ([a-z-]+)", span):
            with pytest.raises(SystemExit) as stopped:
                cli.main([match[1], "--help"])
            assert stopped.value.code == 0, span


def test_wrong_commands_and_options_are_refused() -> None:
    for wrong in (["memory", "model", "--gpu-memroy", "80"], ["memroy", "model"]):
        with pytest.raises(SystemExit):
            parse_ours(*wrong)
    with pytest.raises(SystemExit):
        parse_accelerate("launch", "--config_fiel", "examples/accelerate/gpu_8.yaml", "train.py")
    with pytest.raises((SystemExit, ValueError)):
        parse_script(
            "examples/finetune_text.py", "--model", "m", "--output_dir", "o", "--ep_sise", "8"
        )


def test_every_language_is_checked() -> None:
    """`mermaid` is a picture and `text` is printed output. Blocks of other languages are tested."""
    languages = {block.language for page in pages.names() for block in pages.blocks(page)}
    assert languages <= {"python", "bash", "text", "mermaid", "yaml"}


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=str)
def test_settings_are_those_of_a_file_that_the_page_names(block: pages.Block) -> None:
    names = re.findall(r"\bexamples/(?:accelerate|trainers)/\w+\.yaml", pages.read(block.page))
    wanted = yaml.safe_load(block.text)
    files = [yaml.safe_load((ROOT / name).read_text()) for name in names]
    assert any(_is_part(wanted, file) for file in files), names


def _is_part(settings: dict[str, Any], whole: dict[str, Any]) -> bool:
    return all(
        _is_part(value, whole.get(name, {}))
        if isinstance(value, dict)
        else value == whole.get(name)
        for name, value in settings.items()
    )


def test_blocks_of_a_page_by_hand() -> None:
    page = "a\n\n```python\nx = 1\n```\nb\n```bash\nls\n```\n\n```python\ny\n```\n"
    assert [block[1:] for block in pages.blocks("p", page)] == [
        (0, "python", "x = 1\n"),
        (0, "bash", "ls\n"),
        (1, "python", "y\n"),
    ]
    for bad in ("```\nx\n```\n", "a\n\n    indented\n", "```python\nx\n"):
        with pytest.raises(ValueError, match="p: "):
            pages.blocks("p", bad)
