"""README and CONTRIBUTING are short and plain, and whatever they name exists."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hf_moe_ep.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "examples/README.md",
        "benchmarks/results/README.md",
    )
}
README = PAGES["README.md"]
TREE_HEADING = "## Find your way in the source\n"


def tree(page: str) -> Iterator[tuple[Path, str]]:
    """(path, what the line says) of every folder and file that the source tree names.

    Indentation nests, a line's first word is what it is about, names of files in the rest of a line
    stand beside the first.
    """
    lines = page.split(TREE_HEADING)[1].split("\n## ")[0].splitlines()
    folders: list[tuple[int, Path]] = []
    for line in lines:
        if not line.startswith("    "):
            continue
        indent = len(line) - len(line.lstrip())
        folders = [(i, folder) for i, folder in folders if i < indent]
        parent = folders[-1][1] if folders else Path()
        name, _, about = line.strip().partition(" ")
        if name.endswith("/"):
            folders.append((indent, parent / name))
            yield parent / name, about.strip()
            continue
        for file in re.findall(r"\w+\.py", line):
            yield parent / file, about.strip()


@cache
def order() -> list[str]:
    """ORDER of test_imports.py as one list of names, from top to bottom."""
    module = ast.parse((ROOT / "tests/house/test_imports.py").read_text())
    rows = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER"
    )
    return [row.split() for row in rows]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_plain(name: str) -> None:
    page = PAGES[name]
    assert page.isascii()
    assert "@@" not in page, "a figure is still to be filled in"
    # A row of a table is one line, however long.
    wide = [line for line in page.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not wide, wide


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name: str) -> None:
    page, here = PAGES[name], (ROOT / name).parent
    words = re.findall(r"`([^`\n]+)`", page) + re.findall(r"\]\(([^)#]+)\)", page)
    top = "tests|examples|benchmarks|notebooks|hf_moe_ep|model_patches"
    paths = {w for w in words if re.fullmatch(rf"({top})/[\w./-]*|[\w./-]+\.(md|ipynb|png)", w)}
    paths = {path for path in paths if not path.startswith("out/")}  # what a run writes
    # Only what a shell is given; `make demo` in prose is checked as well.
    in_blocks = re.findall(r"\b(?:examples|benchmarks|tests)/[\w/]+\.(?:py|yaml|sh)\b", page)
    assert paths or in_blocks
    missing = [p for p in {*paths, *in_blocks} if not ((ROOT / p).exists() or (here / p).exists())]
    assert not missing, f"{name} names {missing}"

    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    asked = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", page, flags=re.MULTILINE))
    assert asked <= targets, f"{name} asks for make {asked - targets}"


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_a_page_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in set(re.findall(r"(?:`|^    )hf-moe-ep ([a-z-]+)", PAGES[name], re.MULTILINE)):
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0, command
    capsys.readouterr()


@pytest.mark.parametrize("name", PAGES)
def test_python_of_a_page_parses_and_imports_what_exists(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGES[name], flags=re.DOTALL)
    assert blocks or name != "README.md"
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
    for attribute in re.findall(r"`hf_moe_ep\.(\w+)", PAGES[name]):
        assert hasattr(importlib.import_module("hf_moe_ep"), attribute), attribute


def test_a_newcomer_reads_two_screens() -> None:
    before, _, _ = README.partition("## How it works\n")
    assert before != README
    assert len(before.splitlines()) <= 100
    assert len(PAGES["CONTRIBUTING.md"].splitlines()) <= 80


def test_the_tree_names_every_folder_and_nothing_that_is_not_there() -> None:
    named = dict(tree(README))
    missing = [str(path) for path in named if not (ROOT / path).exists()]
    assert not missing, f"the tree names {missing}"
    folders = {path for path in named if (ROOT / path).is_dir()}
    real = {
        file.parent.relative_to(ROOT)
        for top in ("hf_moe_ep", "model_patches")
        for file in (ROOT / top).rglob("*.py")
    }
    assert folders == real
    silent = [str(path) for path, about in named.items() if not about and path.name != "hf_moe_ep"]
    assert not silent, f"the tree says nothing of {silent}"


def test_the_tree_is_in_the_order_of_imports() -> None:
    inside = [path for path, _ in tree(README) if path.parent == Path("hf_moe_ep")]
    rows = {name: number for number, row in enumerate(order()) for name in row}
    numbers = [rows[path.stem] for path in inside]
    assert numbers == sorted(numbers)
    # All of them stand in the tree; model_patches is a package of its own.
    assert {path.stem for path in inside} == rows.keys() - {"__init__", "__main__", "model_patches"}


def test_the_tree_as_it_is_read() -> None:
    page = f"""{TREE_HEADING}
    top/
      moe/     the layer
        a.py     one thing; b.py, another
      state.py what is kept
"""
    assert dict(tree(page)) == {
        Path("top"): "",
        Path("top/moe"): "the layer",
        Path("top/moe/a.py"): "one thing; b.py, another",
        Path("top/moe/b.py"): "one thing; b.py, another",
        Path("top/state.py"): "what is kept",
    }
