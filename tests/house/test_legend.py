"""Every letter of a shape suffix (`x_TH`) stands in the package's one legend, `moe/layer.py`.

Read off the syntax tree of the data path: what is assigned, read, passed or declared. Names in
capitals are constants, and a digit alone is no shape.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hf_moe_ep"
FOLDERS = ("moe", "ops", "sequence", "vision", "lora")
SUFFIX = re.compile(r"_([A-Z0-9]{1,5})$")
# A line of the legend has one letter or two, in columns: "    B  batch      S  sequence".
ENTRY = re.compile(r"(?:^| {3,})([A-Z])  (?=\S)", re.MULTILINE)


def legend() -> set[str]:
    docstring = ast.get_docstring(ast.parse((PACKAGE / "moe" / "layer.py").read_text()))
    assert docstring is not None
    entries = ENTRY.findall(docstring.partition("Shape legend")[2])
    assert len(set(entries)) == len(entries), f"a letter stands there twice: {entries}"
    return set(entries)


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, identifier) of all that the syntax tree names."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name):
                yield node.lineno, name


def letters(name: str) -> str:
    """The letters of a name's shape suffix; none where it has no such suffix."""
    found = SUFFIX.search(name)
    return "" if found is None or name.isupper() else re.sub("[0-9]", "", found[1])


def undefined(text: str, defined: set[str]) -> list[str]:
    found = {
        f"line {line}: {name} uses {letter}"
        for line, name in names(ast.parse(text))
        for letter in letters(name)
        if letter not in defined
    }
    return sorted(found)


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_letter_is_in_the_legend(path: Path) -> None:
    problems = undefined(path.read_text(), legend())
    assert not problems, "\n".join(
        [f"the legend (moe/layer.py) lacks letters of {path}", *problems]
    )


def test_the_legend_has_no_letter_that_nobody_uses() -> None:
    used = {
        letter
        for path in sources()
        for _, name in names(ast.parse(path.read_text()))
        for letter in letters(name)
    }
    assert legend() <= used, f"nobody uses {sorted(legend() - used)}"


def test_what_counts_as_a_suffix() -> None:
    assert letters("expert_ids_TK") == "TK" and letters("routing_R2K") == "RK"
    assert letters("FP32_BUDGET") == letters("BLOCK_M") == letters("next_power_of_2") == ""
    text = "def f(x_TZ, counts_L):\n    self.y_ZH = x_TZ\n    g(row_Z=BLOCK_Z)"
    assert undefined(text, {"T", "H", "L"}) == [
        "line 1: x_TZ uses Z",
        "line 2: x_TZ uses Z",
        "line 2: y_ZH uses Z",
        "line 3: row_Z uses Z",
    ]
