"""Add a command-line option for each field of ParallelConfig and RunOptions.

    --ep-size 8                      ParallelConfig(ep_size=8), in a process as HF_MOE_EP_EP_SIZE=8
    --recompute-activations          ParallelConfig(recompute_activations=True)
    --no-reshard-after-forward       ParallelConfig(reshard_after_forward=False)

The help of an option is the first sentence about its field in the docstring of the class. If the
user has set a variable and gives no option of that name, the variable is used.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import Field, fields
from typing import Any

from hf_moe_ep.config import (
    CHOICES,
    ParallelConfig,
    RunOptions,
    environment,
    get_variable,
    parse_setting,
)

_KINDS: tuple[type[ParallelConfig] | type[RunOptions], ...] = (ParallelConfig, RunOptions)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting. Options that are not given are not set in the result."""
    for kind in _KINDS:
        sentences = _extract_first_sentences(kind.__doc__ or "")
        for field in fields(kind):
            name = option_of(field.name)
            is_switch = field.type == "bool"
            kwargs: dict[str, Any] = {
                "dest": field.name,
                "default": argparse.SUPPRESS,
                "help": sentences.get(field.name, "").replace("%", "%%"),
            }
            if is_switch:
                parser.add_argument(name, action=argparse.BooleanOptionalAction, **kwargs)
            else:
                parser.add_argument(name, metavar=_make_metavar(field), **kwargs)


def option_of(name: str) -> str:
    """Return the option of a setting: "--ep-size" for "ep_size"."""
    return f"--{name.replace('_', '-')}"


def format_option(field: Field[Any], text: str) -> str:
    """Return the words of an option with a value: "--ep-size 8", "--report" or "--no-report"."""
    option = option_of(field.name)
    if field.type != "bool":
        return f"{option} {text}"
    return option if parse_setting(field, text, "") else f"--no-{option[2:]}"


def variables(given: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the variables for the given options, and a sentence for each variable they replace.

    Raises:
        ValueError: an option, or a variable that no option replaces, has an invalid value; or two
            settings contradict.
    """
    before = environment()
    new: dict[str, str] = {}
    replaced = []
    for kind in _KINDS:
        values: dict[str, Any] = {}
        for field in fields(kind):
            variable, option = get_variable(field.name), option_of(field.name)
            old_text = before.get(variable, "").strip()
            if not hasattr(given, field.name):
                if old_text:
                    values[field.name] = parse_setting(field, old_text, f"{variable}=")
                continue
            text = _format_value(getattr(given, field.name))
            value = parse_setting(field, text, f"{option} ")
            if old_text and not _has_value(field, old_text, value):
                replaced.append(f"{format_option(field, text)} replaces {variable}={old_text}")
            values[field.name], new[variable] = value, text
        kind(**values)
    return new, replaced


def _has_value(field: Field[Any], text: str, value: Any) -> bool:
    """Return True if the text of a variable stands for `value`, False if it stands for another."""
    try:
        return bool(parse_setting(field, text, "") == value)
    except ValueError:
        return False  # an invalid value, which the option replaces


def _format_value(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def _make_metavar(field: Field[Any]) -> str:
    """Return the placeholder for an option's values in the help, such as "N" or "{nf4,fp8}"."""
    kind = str(field.type)
    if field.name in CHOICES:
        values = [value for value in CHOICES[field.name] if value is not None]
        return "{" + ",".join(str(value).lower() for value in values) + "}"
    if kind.startswith("tuple"):
        return "N,N,..."
    if kind.startswith("bool"):  # compile_layers; all other switches have no value
        return "true|BACKEND"
    if kind == "int | str":  # dispatch_chunks
        return "N|auto"
    return "N" if kind.startswith("int") else "X" if kind.startswith("float") else "NAME"


def _extract_first_sentences(docstring: str) -> dict[str, str]:
    """Return the first sentence about each argument in a docstring."""
    arguments = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", arguments, re.MULTILINE)
    texts = {name: " ".join(text.split()).replace("`", "") for name, text in entries}
    return {name: re.split(r"(?<=[^.])\. ", text)[0].rstrip(".") for name, text in texts.items()}
